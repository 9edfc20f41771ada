"""Prints the progress of a start on the terminal."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import rich.progress
from rich.console import Console
from rich.text import Text

REMIND_S = 30.0  # seconds between two lines about the same wait, where no line can move


class StartError(RuntimeError):
    """The cluster cannot start; the message says why and what to do."""


class Progress:
    """Prints one line per event, with the seconds since the start."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(highlight=False, markup=False, soft_wrap=True)
        self._started = time.monotonic()

    def step(self, text: str) -> None:
        elapsed = f"{time.monotonic() - self._started:6.1f} s  "
        self._console.print(Text.assemble((elapsed, "dim"), text))

    def say(self, text: str, style: str = "") -> None:
        self._console.print(text, style=style)

    def fail(self, text: str) -> None:
        """Print an error. On a terminal its lines end between words."""
        self._console.print(text, style="red", soft_wrap=not self._console.is_terminal)

    @contextmanager
    def waiting(self, what: str) -> Iterator[Callable[[str], None]]:
        """Show what is awaited, and since when, until the block ends.

        On a terminal it is a moving line. Elsewhere it is a line every REMIND_S, if the block
        calls the yielded function often enough.

        Yields:
            A function that sets what is awaited.
        """
        columns = (
            rich.progress.SpinnerColumn(),
            rich.progress.TextColumn("waiting for {task.description}", markup=False),
            rich.progress.TimeElapsedColumn(),
        )
        is_moving = self._console.is_terminal
        began_s = reminded_s = time.monotonic()

        with rich.progress.Progress(
            *columns, console=self._console, transient=True, disable=not is_moving
        ) as shown:
            task = shown.add_task(what)

            def update(what: str) -> None:
                nonlocal reminded_s
                shown.update(task, description=what)
                now_s = time.monotonic()
                if not is_moving and now_s - reminded_s >= REMIND_S:
                    self.step(f"still waiting for {what}, for {now_s - began_s:.0f} s")
                    reminded_s = now_s

            yield update
