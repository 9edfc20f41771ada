"""The tests of the engine on the oldest vLLM that kvroute supports."""

import os
import subprocess

import pytest

from tests.support.environments import environment
from tests.support.repository import ROOT

# The first does not run the engine. The second starts a cluster, which needs kvroute installed.
WITHOUT = ("test_contributing_steps.py", "test_cannot_run.py")


@pytest.mark.timeout(3600)
def test_the_engine_passes_its_tests_on_an_older_vllm() -> None:
    python = environment("older-vllm", with_ours=True)
    version = "import vllm; print(vllm.__version__)"
    assert _run(python, "-c", version).stdout.startswith("0.31.")
    ignored = [f"--ignore=tests/slow/engines/{name}" for name in WITHOUT]
    options = ("-q", "-p", "no:cacheprovider", "-n", "0", "-rfE", *ignored)
    done = _run(python, "-m", "pytest", *options, "tests/slow/engines")
    assert done.returncode == 0, done.stdout[-20_000:]


def _run(*command: object) -> "subprocess.CompletedProcess[str]":
    """Run a command in the repository."""
    environment = {name: value for name, value in os.environ.items() if "PYTEST" not in name}
    return subprocess.run(
        [str(part) for part in command], cwd=ROOT, env=environment, capture_output=True, text=True
    )
