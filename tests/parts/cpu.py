"""Control groups (version 2), which measure the CPU time of processes and of their children."""

import os
import uuid
from contextlib import suppress
from pathlib import Path

ROOTS = (Path("/sys/fs/cgroup/unified"), Path("/sys/fs/cgroup"))  # with version 1 beside it, or not


class ControlGroup:
    """A control group below this process's own. All processes that its members start join it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def join(self) -> None:
        """Move this process into the group."""
        (self._folder / "cgroup.procs").write_text(str(os.getpid()))

    def cpu_s(self) -> float:
        """Return how many CPU seconds the group's processes have used, ended ones included."""
        lines = (self._folder / "cpu.stat").read_text().splitlines()
        (usage,) = (line.split()[1] for line in lines if line.startswith("usage_usec "))
        return int(usage) / 1e6

    def pids(self) -> set[int]:
        """Return the ids of the group's processes."""
        files = self._folder.rglob("cgroup.procs")
        return {int(pid) for file in files for pid in file.read_text().split()}

    def remove(self) -> None:
        """Remove the group and those below it, unless processes remain in them."""
        for folder in (*sorted(self._folder.glob("*/"), reverse=True), self._folder):
            with suppress(OSError):
                folder.rmdir()


def control_group() -> ControlGroup | None:
    """Make a control group; return None if this user or machine cannot."""
    with suppress(OSError, ValueError):
        lines = Path("/proc/self/cgroup").read_text().splitlines()
        (own,) = (line.removeprefix("0::/") for line in lines if line.startswith("0::/"))
        root = next(root for root in ROOTS if (root / "cgroup.procs").exists())
        folder = root / own / f"kvroute-{uuid.uuid4().hex}"
        folder.mkdir()
        group = ControlGroup(folder)
        if os.access(folder.parent / "cgroup.procs", os.W_OK):
            return group
        group.remove()
    return None
