"""The README's two commands set up a minimal machine and work there.

Nothing that this machine has installed is there: no venv module, no libnuma, no compiler, no git.
"""

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from kvroute.local.ports import free_port
from kvroute.process.builtin_model import BUILTIN_MODEL
from tests.support.bare_machine import BareMachine
from tests.support.documents import README, steps
from tests.support.serving import READY
from tests.support.untested import needs
from tests.support.waiting import wait_until

pytestmark = [
    needs("debootstrap", "unshare"),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can make and enter a root file system"),
    pytest.mark.timeout(3600),
]
SETUP_S = 1800  # a slow network's share
# Of each folder of `make test` a module, so that this does not take as long as `make test` does.
SOME_TESTS = "tests/unit/test_packaging.py tests/redis/test_index.py tests/cluster/test_origins.py"


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BareMachine]:
    machine = BareMachine(tmp_path_factory.mktemp("bare") / "root")
    machine.install()
    yield machine
    subprocess.run(["rm", "-rf", str(machine.folder)], check=True)


def test_make_serve_sets_the_machine_up_and_answers(machine: BareMachine, tmp_path: Path) -> None:
    port, output = free_port(), tmp_path / "output"
    command = "make serve"
    assert command in {step.text.partition("#")[0].strip() for step in steps(README)}
    with machine.running(f'{command} ARGS="--port {port}"', output) as process:
        wait_until(lambda: READY in output.read_text() or process.poll(), within_s=SETUP_S)
        said = output.read_text()
        assert process.poll() is None, said
        assert "setup: installing libnuma1 python3-venv" in said
        assert said.index("GB into .venv; takes about") < said.index("setup: 1/4")
        body = {"model": BUILTIN_MODEL, "messages": [{"role": "user", "content": "Hello"}]}
        url = f"http://127.0.0.1:{port}/v1/chat/completions"
        assert httpx.post(url, json=body, timeout=120).json()["usage"]["completion_tokens"] > 0
        os.killpg(process.pid, signal.SIGINT)
        process.wait(60)
        assert "Traceback" not in output.read_text()


def test_make_test_runs_there(machine: BareMachine, tmp_path: Path) -> None:
    output = tmp_path / "output"
    with machine.running(f'make test ARGS="{SOME_TESTS}"', output) as process:
        assert process.wait(SETUP_S) == 0, output.read_text()
    assert " passed" in output.read_text()
