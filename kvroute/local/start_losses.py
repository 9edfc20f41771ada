"""Counts the routers and replicas that end during a start, and says what an ended process was."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from kvroute.deployments import APPLICATION, kind_of, of_model
from kvroute.machine.problem import StartError
from kvroute.wording import plural

# A start has failed when this many times as many processes of a deployment have ended as it should
# have. Serve makes as many attempts if constructors raise errors.
ATTEMPTS = 3
FATAL = "Fatal Python error: "  # line in a process's error output that Python writes at a crash
FIRST_LINES = 10  # Ray writes what a process runs in one of the first lines of its output
ACTOR = ":actor_name:"  # begins the line in which Ray writes what a process runs
SERVE_PARTS = {  # class of a process of Ray Serve -> its name for users
    "ServeController": "Ray Serve's controller",
    "ProxyActor": "Ray Serve's proxy",
    "HAProxyManager": "Ray Serve's manager of HAProxy",
}


@dataclass(frozen=True, slots=True)
class Lost:
    """A router or replica that has ended."""

    name: str  # such as "router 3kd8f2a1 (process 417)"
    log: Path
    cause: str  # the signal or error as far as it is known; else empty

    def __str__(self) -> str:
        cause = f" ({self.cause})" if self.cause else ""
        return f"{self.name} has ended{cause}; its log is {self.log}"


class StartLosses:
    """The routers and replicas that have ended since the start began."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs  # folder of Ray's logs
        self._seen: dict[str, dict[str, Any]] = {}  # deployment -> replica id -> Serve's details
        self._lost: dict[str, list[Lost]] = {}  # deployment -> its ended processes in their order

    def update(self, deployments: Mapping[str, Any]) -> None:
        """Count the processes that have ended, by Serve's details of all deployments.

        Raises:
            StartError: Too many have ended.
        """
        for name, details in deployments.items():
            seen, lost = self._seen.setdefault(name, {}), self._lost.setdefault(name, [])
            running = {replica["replica_id"]: replica for replica in details["replicas"]}
            for id_ in [*seen]:
                if id_ not in running:
                    lost.append(self._describe(name, seen.pop(id_)))
            seen |= running
            wanted = max(1, details["target_num_replicas"])
            if len(lost) >= ATTEMPTS * wanted:
                raise StartError(
                    f"{plural(len(lost), kind_of(name))} ended during the start; the last one: "
                    f"{lost[-1]}"
                )

    def last(self) -> Iterator[str]:
        """Yield a line for the last process of each deployment that has ended."""
        return (str(lost[-1]) for lost in self._lost.values() if lost)

    def _describe(self, name: str, replica: Mapping[str, Any]) -> Lost:
        pid = replica.get("pid")
        return Lost(
            f"{kind_of(name)} {replica['replica_id']}{of_model(name)} (process {pid})",
            log_of(replica, self._logs),
            self._crash(pid),
        )

    def _crash(self, pid: int | None) -> str:
        """Return the signal that Python has written to the process's error output, if any."""
        for file in self._logs.glob(f"worker-*-{pid}.err"):
            lines = file.read_text(errors="replace").splitlines()
            crashes = [line.partition(FATAL)[2] for line in lines if FATAL in line]
            if crashes:
                return crashes[-1]
        return ""


def log_of(replica: Mapping[str, Any], logs: Path) -> Path:
    """Return the log of a router or replica.

    Args:
        replica: Serve's details of the router or replica.
        logs: The folder of Ray's logs.
    """
    return logs / str(replica.get("log_file_path") or "serve").lstrip("/")


def role_of(pid: int, logs: Path) -> str:
    """Return what a process of Ray does, such as "replica", from its output in the logs."""
    for file in logs.glob(f"worker-*-{pid}.err"):
        with suppress(OSError), file.open(errors="replace") as lines:
            for line in islice(lines, FIRST_LINES):
                if line.startswith(ACTOR):
                    return _role(line.removeprefix(ACTOR).strip())
    return "process"


def _role(actor: str) -> str:
    _, is_ours, deployment = actor.partition(f"ServeReplica:{APPLICATION}:")
    if is_ours:
        return f"{kind_of(deployment)}{of_model(deployment)}"
    return SERVE_PARTS.get(actor, "process")
