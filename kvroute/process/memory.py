"""How much memory there is: the node's, or as much of it as this container may take."""

from pathlib import Path

import psutil

CGROUPS = Path("/sys/fs/cgroup")
LIMITS = ("memory.max", "memory/memory.limit_in_bytes")  # of cgroups v2 and v1


def memory_bytes(cgroups: Path = CGROUPS) -> int:
    """A pod's limit is often a small part of its node's memory, and who takes more is killed."""
    return min([psutil.virtual_memory().total, *_limits(cgroups)])


def _limits(cgroups: Path) -> list[int]:
    """Without a limit, v2 says `max` and v1 a number that no memory reaches."""
    files = (cgroups / name for name in LIMITS)
    texts = [file.read_text().strip() for file in files if file.is_file()]
    return [int(text) for text in texts if text.isdecimal()]
