"""What a benchmark found, as people and as programs read it."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Row = dict[str, str | int | float | None]  # heading -> value; None: not measured here


@dataclass(frozen=True)
class Section:
    title: str
    rows: list[Row]
    notes: Sequence[str] = ()

    def markdown(self) -> str:
        """The table without the columns that nothing was measured for."""
        headings = [
            name for name in self.rows[0] if any(row[name] is not None for row in self.rows)
        ]
        lines = [headings, ["---"] * len(headings)]
        lines += [[_cell(row[name]) for name in headings] for row in self.rows]
        table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        return "\n\n".join([f"## {self.title}", table, *self.notes])


def each_s(act: Callable[[], object], rounds: int) -> list[float]:
    """How long it took, each time."""
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
