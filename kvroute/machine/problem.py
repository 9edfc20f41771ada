"""What keeps a cluster from starting, or may give it trouble."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """One problem, with its cause and its remedy in one line."""

    text: str
    is_final: bool = False  # True: the cluster cannot start; False: it runs, but may have trouble


class StartError(RuntimeError):
    """The cluster cannot start. The message says why, and what the user can do."""
