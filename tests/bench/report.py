"""The results of benchmarks, as Markdown and as JSON."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Row = dict[str, str | int | float | None]  # column -> value; None: not measured


@dataclass(frozen=True)
class Section:
    title: str
    rows: list[Row]
    notes: Sequence[str] = ()

    def markdown(self) -> str:
        """Return the table, without columns in which nothing was measured."""
        headings = [
            name for name in self.rows[0] if any(row[name] is not None for row in self.rows)
        ]
        lines = [headings, ["---"] * len(headings)]
        lines += [[_cell(row[name]) for name in headings] for row in self.rows]
        table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        return "\n\n".join([f"## {self.title}", table, *self.notes])


def each_s(act: Callable[[], object], rounds: int) -> list[float]:
    """Call a function `rounds` times, and return the seconds of each call."""
    times_s = []
    for _ in range(rounds):
        begun = time.perf_counter()
        act()
        times_s.append(time.perf_counter() - begun)
    return times_s


def _cell(value: str | int | float | None) -> str:
    match value:
        case None:
            return ""
        case float():
            return f"{value:,.3f}" if abs(value) < 100 else f"{value:,.0f}"
        case int():
            return f"{value:,}"
    return value
