"""The memory that this process can use: the node's memory, or the limit of its container."""

from pathlib import Path

import psutil

CGROUPS = Path("/sys/fs/cgroup")  # where Linux mounts the control groups of this container
LIMITS = ("memory.max", "memory/memory.limit_in_bytes")  # files of cgroups v2 and of v1


def memory_bytes(cgroups: Path = CGROUPS) -> int:
    """Return how many bytes of memory this process can use before the kernel kills it.

    A pod's limit is often a small part of its node's memory.
    """
    return min([psutil.virtual_memory().total, *_limits(cgroups)])


def _limits(cgroups: Path) -> list[int]:
    files = (cgroups / name for name in LIMITS)
    texts = [file.read_text().strip() for file in files if file.is_file()]
    # If there is no limit, cgroups v2 has the text `max`, and v1 has a huge number.
    return [int(text) for text in texts if text.isdecimal()]
