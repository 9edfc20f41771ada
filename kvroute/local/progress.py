"""Prints the progress of a start on the terminal."""

import time

from rich.console import Console


class StartError(RuntimeError):
    """The cluster cannot start; the message says why and what to do."""


class Progress:
    """Prints one line per event, with the seconds since the start."""

    def __init__(self) -> None:
        self._console = Console(highlight=False, markup=False, soft_wrap=True)
        self._started = time.monotonic()

    def step(self, text: str) -> None:
        self._console.print(f"{time.monotonic() - self._started:6.1f} s  ", style="dim", end="")
        self._console.print(text)

    def say(self, text: str, style: str = "") -> None:
        self._console.print(text, style=style)

    def fail(self, text: str) -> None:
        self._console.print(text, style="red")
