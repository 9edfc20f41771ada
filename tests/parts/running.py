"""Runs a part as a process, and ends everything that it started."""

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO

import msgspec
import psutil
import pytest

from tests.parts.all_parts import Part
from tests.parts.counting import COUNTS_FILE, Counts
from tests.parts.cpu import ControlGroup, control_group
from tests.parts.results import FOLDER, Result, Revision, State, revision
from tests.support.repository import ROOT
from tests.support.serving import name_of

EXAMPLES = {"KVROUTE_EXAMPLES": "200"}  # random examples of each property: see tests/conftest.py
MARK = "KVROUTE_PART_MARK"  # environment variable that every process of a part inherits
STOP_S = 60.0  # seconds that a part has to end after Ctrl-C, with its clusters
KILL_S = 10.0  # seconds that processes have to end after SIGTERM
INTERRUPTED = 128 + signal.SIGINT


def run(name: str, part: Part) -> Result:
    """Run a part, and return its result. Its output is also in .parts/NAME.log."""
    before, start_s = revision(), time.monotonic()
    counts_file = FOLDER / f"{name}.counts"
    counts_file.unlink(missing_ok=True)
    try:
        command = part.arguments()
    except pytest.skip.Exception as skipped:
        return Result(
            revision=before,
            state="skipped",
            exit_code=0,
            wall_s=time.monotonic() - start_s,
            cpu_s=None,
            why_skipped=str(skipped),
        )
    group, mark = control_group(), uuid.uuid4().hex
    env = {**os.environ, **EXAMPLES, **part.env, COUNTS_FILE: str(counts_file), MARK: mark}
    try:
        with (FOLDER / f"{name}.log").open("w+b", buffering=0) as log, _cleared(mark, group):
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches it from here only
                preexec_fn=partial(_enter, group),
            )
            exit_code = _follow(process, log.name)
        cpu_s = group.cpu_s() if group else None
    finally:
        if group:
            group.remove()
    modules = _counted(counts_file)
    if exit_code == pytest.ExitCode.NO_TESTS_COLLECTED and modules:
        exit_code = 0  # all modules were skipped
    after = revision()
    return Result(
        revision=before if before == after else Revision(before.commit, is_clean=False),
        state=_state(exit_code, modules),
        exit_code=exit_code,
        wall_s=time.monotonic() - start_s,
        cpu_s=cpu_s,
        modules=modules,
    )


def _enter(group: ControlGroup | None) -> None:
    """Prepare the process of a part before its command begins."""
    # A shell lets the programs that it starts in the background ignore Ctrl-C. A part does not.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if group:
        group.join()


def _follow(process: "subprocess.Popen[bytes]", log: str) -> int:
    """Print the part's output until it ends; return its exit code.

    Ctrl-C also ends the part.
    """
    with Path(log).open("rb") as output:
        try:
            while process.poll() is None:
                _copy(output)
                time.sleep(0.2)
        except KeyboardInterrupt:
            print("\nending this part and its clusters; Ctrl-C again to kill them")
            os.killpg(process.pid, signal.SIGINT)
            with suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
                process.wait(STOP_S)
            _copy(output)
            return INTERRUPTED
        _copy(output)
    # A negative code is the number of the signal that ended the process.
    return process.returncode if process.returncode >= 0 else 128 - process.returncode


def _copy(output: BinaryIO) -> None:
    sys.stdout.buffer.write(output.read())
    sys.stdout.buffer.flush()


def _counted(file: Path) -> dict[str, Counts]:
    if not file.exists():
        return {}
    counted = msgspec.json.decode(file.read_bytes(), type=dict[str, Counts])
    file.unlink()
    return counted


def _state(exit_code: int, modules: dict[str, Counts]) -> State:
    if exit_code == INTERRUPTED:
        return "interrupted"
    if exit_code:
        return "failed"
    ends = {end for counts in modules.values() for end in counts.tests.values()}
    return "skipped" if ends and "passed" not in ends else "passed"


@contextmanager
def _cleared(mark: str, group: ControlGroup | None) -> Iterator[None]:
    """End the processes of the part that still run at the end of the context."""
    try:
        yield
    finally:
        if left := _left(mark, group):
            names = sorted({name_of(process) for process in left})
            print(f"ending {len(left)} processes that this part has left: {', '.join(names)}")
            _send(signal.SIGTERM, left)
            psutil.wait_procs(left, timeout=KILL_S)
            _send(signal.SIGKILL, stubborn := _left(mark, group))
            psutil.wait_procs(stubborn, timeout=KILL_S)


def _left(mark: str, group: ControlGroup | None) -> list[psutil.Process]:
    """Return the part's processes: members of its control group, or those with its mark.

    Ray's workers overwrite their environment with a title, so the mark is not enough.
    """
    members = group.pids() if group else set()
    return [
        process
        for process in psutil.process_iter()
        if process.pid in members or _has(process, mark)
    ]


def _send(number: signal.Signals, processes: Iterable[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def _has(process: psutil.Process, mark: str) -> bool:
    with suppress(psutil.Error):
        return process.environ().get(MARK) == mark
    return False
