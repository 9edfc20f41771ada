"""A figure of a feature for those who watch a router: a number with a few words."""

from typing import NamedTuple


class Figure(NamedTuple):
    """What a feature does now, or did in the last minutes."""

    title: str
    value: str
    note: str  # what the value consists of, or why it is as it is
    about: str  # explains the title
    is_bad: bool = False  # whether operators should do something about it
