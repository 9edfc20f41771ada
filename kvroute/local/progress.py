"""Prints the progress of a start on the terminal."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import rich.progress
from rich.console import Console
from rich.text import Text

REMIND_S = 30.0  # seconds between two lines about the same wait, if the output is not a terminal


class StartProgress:
    """Prints the progress of a start, one line per event."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(highlight=False, markup=False, soft_wrap=True)
        self._started = time.monotonic()

    def step(self, text: str) -> None:
        """Print a line with the seconds since the start."""
        self._print_with_time(text)

    def say(self, text: str, style: str = "") -> None:
        """Print a line without a time."""
        self._console.print(text, style=style)

    def warn(self, text: str) -> None:
        """Print a problem in spite of which the cluster can run, with the seconds like `step`."""
        self._print_with_time(f"WARNING: {text}", style="yellow")

    def _print_with_time(self, text: str, style: str = "") -> None:
        elapsed = f"{time.monotonic() - self._started:6.1f} s  "
        self._console.print(Text.assemble((elapsed, "dim"), (text, style)))

    def fail(self, text: str) -> None:
        """Print an error. On a terminal, long lines are broken between words."""
        self._console.print(text, style="red", soft_wrap=not self._console.is_terminal)

    @contextmanager
    def waiting(self, event: str) -> Iterator[Callable[[str], None]]:
        """Show which event the user is waiting for, and for how long, until the block ends.

        A terminal shows a line that changes. Other output gets a line every REMIND_S, if the block
        calls the yielded function often enough.

        Yields:
            A function that changes the shown name of the event.
        """
        columns = (
            rich.progress.SpinnerColumn(),
            rich.progress.TextColumn("waiting for {task.description}", markup=False),
            rich.progress.TimeElapsedColumn(),
        )
        is_moving = self._console.is_terminal
        start_s = reminded_s = time.monotonic()

        with rich.progress.Progress(
            *columns, console=self._console, transient=True, disable=not is_moving
        ) as shown:
            task = shown.add_task(event)

            def update(event: str) -> None:
                nonlocal reminded_s
                shown.update(task, description=event)
                now_s = time.monotonic()
                if not is_moving and now_s - reminded_s >= REMIND_S:
                    self.step(f"still waiting for {event}, for {now_s - start_s:.0f} s")
                    reminded_s = now_s

            yield update
