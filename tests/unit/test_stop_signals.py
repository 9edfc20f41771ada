"""What `kvroute serve` prints when it is killed, or when its process ends unexpectedly."""

import subprocess
import sys

import pytest

SECOND_SIGNAL = """
import os, signal, subprocess, sys, threading
from kvroute.local import signals

child = subprocess.Popen(["sleep", "60"])


def watch() -> None:
    child.wait()
    for output in (1, 2):
        os.write(output, b"the child has ended")


watcher = threading.Thread(target=watch)
watcher.start()
stop = signals.StopSignals()
kill = signals.kill_descendants
signals.kill_descendants = lambda: (kill(), watcher.join())
stop.kill_on_next_signal()
signal.raise_signal(signal.SIGINT)
"""
GUARDED = """
import os, signal, sys
from kvroute.local.guard import guarded, leave

sys.exit(guarded(lambda: {}))
"""


def run(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)


def test_the_second_signal_kills_everything_and_prints_one_line() -> None:
    done = run(SECOND_SIGNAL)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (130, "killing everything", "")


@pytest.mark.parametrize(
    ("end", "said"),
    [
        ("os._exit(1)", "with exit code 1"),  # as Ray's library does if Ray's head service is lost
        ("os.kill(os.getpid(), signal.SIGKILL)", "by the signal Killed"),
    ],
)
def test_an_end_that_nobody_has_explained_is_reported_with_the_remedy(end: str, said: str) -> None:
    done = run(GUARDED.format(end))
    assert done.returncode == 1
    assert said in done.stdout
    assert "run kvroute serve again" in done.stdout


@pytest.mark.parametrize(("end", "code"), [("0", 0), ("1", 1), ("leave(1)", 1)])
def test_an_end_that_was_explained_is_not_reported(end: str, code: int) -> None:
    done = run(GUARDED.format(end))
    assert (done.returncode, done.stdout) == (code, "")
