"""The classes of requests, by how long they can wait."""

from typing import Literal

# interactive: somebody waits for the answer. batch: it fills what the others leave.
Priority = Literal["interactive", "default", "batch"]
PRIORITIES: tuple[Priority, ...] = ("interactive", "default", "batch")  # the most urgent first


def named(name: str) -> Priority | None:
    """None: there is no such class."""
    return next((each for each in PRIORITIES if each == name), None)


def later(one: Priority, other: Priority) -> Priority:
    """The less urgent of both."""
    return max(one, other, key=PRIORITIES.index)
