"""Priority classes of requests."""

from typing import Literal

# interactive: a person waits for the answer. batch: the request runs only on idle capacity.
Priority = Literal["interactive", "default", "batch"]
PRIORITIES: tuple[Priority, ...] = ("interactive", "default", "batch")  # the most urgent first


def parse_priority(name: str) -> Priority | None:
    """Return the priority class with this name, or None."""
    return next((priority for priority in PRIORITIES if priority == name), None)


def less_urgent(first: Priority, second: Priority) -> Priority:
    """Return the less urgent of two priority classes."""
    return max(first, second, key=PRIORITIES.index)
