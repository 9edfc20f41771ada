"""The one style of tables and of named lines: bold headings, no lines, numbers at the right.

Nothing is cut and no word is broken. A table that is too wide for the terminal is printed row by
row, a line for each cell.
"""

import textwrap
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

GAP = 2  # spaces between two columns
LEAST_WIDTH = 20  # columns of a wrapped text, however long the name before it is
LEAST_S = 5e-5  # shorter times, in seconds, are shown as 0

Cell = str | Text


class Column(NamedTuple):
    """A column's heading, which may have several lines, and how its cells are shown."""

    heading: str
    is_number: bool = False  # at the right
    is_prose: bool = False  # lines may end between words

    def width(self, cells: Iterable[str]) -> int:
        """Return the least width in which no cell is cut."""
        parts = [*self.heading.splitlines()]
        for cell in cells:
            parts += cell.split() if self.is_prose else [cell]
        return max(map(cell_len, parts), default=0)


def plain_console(*, err: bool = False) -> Console:
    """Return a console that prints names as they are, also those with brackets or colons."""
    return Console(highlight=False, markup=False, emoji=False, stderr=err)


def number(heading: str) -> Column:
    """Return a column of numbers."""
    return Column(heading, is_number=True)


def prose(heading: str) -> Column:
    """Return a column of sentences."""
    return Column(heading, is_prose=True)


def print_table(columns: Sequence[Column], rows: Sequence[Sequence[Cell]]) -> None:
    """Print the rows below the columns' headings, or row by row if they do not fit."""
    console = plain_console()
    cells = [[str(row[i]) for row in rows] for i in range(len(columns))]
    widths = [column.width(below) for column, below in zip(columns, cells, strict=True)]
    if sum(widths) + GAP * (len(columns) - 1) > console.width:
        headings = [" ".join(column.heading.split()) for column in columns]
        for i, row in enumerate(rows):
            print_lines([*zip(headings, row, strict=True)], with_gap=i > 0)
        return
    table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="bold")
    for column, width in zip(columns, widths, strict=True):
        table.add_column(
            column.heading,
            justify="right" if column.is_number else "left",
            min_width=width,
            no_wrap=not column.is_prose,
            vertical="bottom" if column.is_number else "top",
        )
    for row in rows:
        table.add_row(*row)
    console.print(table)


def print_lines(lines: Sequence[tuple[str, Cell]], *, with_gap: bool = False) -> None:
    """Print a name and a value in each line; values that are too long go on below themselves.

    Args:
        lines: Names and values.
        with_gap: Print an empty line first.
    """
    console = plain_console()
    left = max(cell_len(name) for name, _ in lines) + GAP
    if with_gap:
        console.print()
    for name, value in lines:
        style = value.style if isinstance(value, Text) else ""
        for i, part in enumerate(_wrapped(str(value), console.width - left)):
            label = Text((name if i == 0 else "").ljust(left), "bold")
            console.print(label + Text(part, style), soft_wrap=True)


def print_sentence(text: str, *, err: bool = False) -> None:
    """Print a sentence in lines that end between words.

    Args:
        text: The sentence.
        err: Print it to standard error.
    """
    console = plain_console(err=err)
    for line in _wrapped(text, console.width):
        console.print(line, soft_wrap=True)


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(
        text, max(LEAST_WIDTH, width), break_long_words=False, break_on_hyphens=False
    ) or [""]


def seconds(value: float) -> str:
    """Return a time with its unit: milliseconds below a second."""
    if value < LEAST_S:
        return "0"
    if value < 1:
        return f"{1000 * value:.3g} ms"
    return f"{value:,.1f} s" if value < 100 else f"{value:,.0f} s"
