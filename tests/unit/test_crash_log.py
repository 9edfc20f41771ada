"""The error that ended an engine is found in vLLM's output."""

import os
from pathlib import Path

import pytest

from kvroute.contract.generation import CannotRunError
from kvroute.replica.vllm_engine.process.crash_log import CrashLog, in_one_line, last_error

CORE = "(EngineCore pid=7) ERROR 11-22 23:27:33 [core.py:1512] "
WORKER = "(Worker_TP0 pid=8) ERROR 11-22 23:27:33 [multiproc_executor.py:953] "
FRONT = "(MainProcess pid=1) ERROR 11-22 23:27:33 [async_llm.py:906] "
DEAD = f"""\
{CORE}ValueError: a request's, of which nobody died
{CORE}EngineCore encountered a fatal error.
{CORE}Traceback (most recent call last):
{CORE}  File "/vllm/v1/engine/core.py", line 1, in run
{CORE}KeyError: 'seldom the cause'
{CORE}RuntimeError: Unsupported: head_dim=20
{FRONT}vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue.
"""
REFUSED = f"""\
{WORKER}WorkerProc failed to start.
{WORKER}ValueError: too large
{CORE}EngineCore failed to start.
{CORE}Exception: WorkerProc initialization failed. See stack trace for root cause.
"""


@pytest.mark.parametrize(
    ("log", "message"),
    [
        (DEAD, "RuntimeError: Unsupported: head_dim=20"),
        (REFUSED, "ValueError: too large"),
        (f"{CORE}ValueError: a request's, of which nobody died\n", ""),
        ("", ""),
    ],
)
def test_the_last_error_of_a_dead_process_is_its_cause(log: str, message: str) -> None:
    assert last_error(log) == message


def test_output_before_the_start_is_ignored(tmp_path: Path) -> None:
    with (tmp_path / "stream").open("w") as stream:
        kept = os.dup(1)
        os.dup2(stream.fileno(), 1)
        try:
            os.write(1, DEAD.encode())
            crash_log = CrashLog()
            before = crash_log.message()
            os.write(1, REFUSED.encode())
            after = crash_log.message()
        finally:
            os.dup2(kept, 1)
            os.close(kept)
    assert (before, after) == ("", "ValueError: too large")


def test_only_errors_that_would_occur_at_every_start_are_final() -> None:
    crash_log = CrashLog()
    assert isinstance(crash_log.start_error(ValueError("no such model\n\nat all")), CannotRunError)
    assert not isinstance(crash_log.start_error(OSError("the port is taken")), CannotRunError)
    assert in_one_line(ValueError("no such model\n\nat all")) == "ValueError: no such model"
