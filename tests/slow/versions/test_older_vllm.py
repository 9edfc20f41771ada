"""The oldest vLLM that kvroute supports is installed beside the packages of this environment.

The parts older-vllm-... of `make test-all` run the tests of the engine with it.
"""

import subprocess

from tests.support.environments import environment


def test_the_environment_has_the_older_vllm() -> None:
    python = environment("older-vllm", with_ours=True)
    command = (str(python), "-c", "import vllm; print(vllm.__version__)")
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout.startswith("0.31."), done.stderr
