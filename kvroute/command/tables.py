"""Prints tables, named values and sentences: bold headings, no lines, numbers at the right.

Nothing is cut, and no word is broken. A table that is too wide for the terminal is wrapped, divided
or, as a last resort, printed row by row.
"""

import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

GAP = 2  # spaces between two columns
MIN_WIDTH = 20  # minimum width of a wrapped text, even if the name before it is long
MIN_SHOWN_S = 5e-5  # shorter times are shown as 0

Cell = str | Text


class Column(NamedTuple):
    """A column: its heading, which may have several lines, and how its cells are shown."""

    heading: str
    is_number: bool = False  # True: the cells are aligned at the right
    is_prose: bool = False  # True: the cells hold sentences, which may be wrapped

    def width(self, cells: Iterable[str]) -> int:
        """Return the smallest width in which no cell is cut."""
        parts = [*self.heading.splitlines()]
        for cell in cells:
            parts += cell.split() if self.is_prose else [cell]
        return max(map(cell_len, parts), default=0)

    def wrapped(self) -> "Column":
        """Return the column with headings and texts that may be wrapped between words."""
        heading = "\n".join(self.heading.split())
        return self._replace(heading=heading, is_prose=not self.is_number)


def plain_console(*, err: bool = False) -> Console:
    """Return a console that prints text unchanged, even with brackets or colons."""
    return Console(highlight=False, markup=False, emoji=False, stderr=err)


def number(heading: str) -> Column:
    """Return a column of numbers."""
    return Column(heading, is_number=True)


def prose(heading: str) -> Column:
    """Return a column of sentences."""
    return Column(heading, is_prose=True)


def print_entries(
    columns: Sequence[Column],
    entries: Sequence[dict[str, Any]],
    row: Callable[[dict[str, Any]], Sequence[Cell]],
) -> None:
    """Print a table with one row for each entry. If there are several models, a column has them."""
    rows = [row(entry) for entry in entries]
    if len({entry["model"] for entry in entries}) > 1:
        columns = [Column("model"), *columns]
        rows = [[entry["model"], *cells] for entry, cells in zip(entries, rows, strict=True)]
    print_table(columns, rows)


def print_table(columns: Sequence[Column], rows: Sequence[Sequence[Cell]]) -> None:
    """Print a table, wrapped or divided if it is too wide for the terminal.

    First texts and headings are wrapped between words. If that is not enough, several tables
    follow each other, all with the first column. If even two columns are too wide, the table is
    printed row by row.
    """
    console = plain_console()
    cells = [[str(row[i]) for row in rows] for i in range(len(columns))]  # column by column
    if _width(columns, cells) > console.width:
        columns = [column.wrapped() for column in columns]
    parts = _parts(columns, cells, console.width)
    if parts is None:
        headings = [" ".join(column.heading.split()) for column in columns]
        for i, row in enumerate(rows):
            print_lines([*zip(headings, row, strict=True)], with_gap=i > 0)
        return
    for i, part in enumerate(parts):
        if i > 0:
            console.print()
        table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="bold")
        for number in part:
            _add_column(table, columns[number], cells[number])
        for row in rows:
            table.add_row(*(row[number] for number in part))
        console.print(table)


def _add_column(table: Table, column: Column, cells: Sequence[str]) -> None:
    table.add_column(
        column.heading,
        justify="right" if column.is_number else "left",
        min_width=column.width(cells),
        no_wrap=not column.is_prose,
    )


def _width(columns: Sequence[Column], cells: Sequence[Sequence[str]]) -> int:
    """Return the smallest width in which all columns fit beside each other."""
    widths = [column.width(texts) for column, texts in zip(columns, cells, strict=True)]
    return sum(widths) + GAP * (len(columns) - 1)


def _parts(
    columns: Sequence[Column], cells: Sequence[Sequence[str]], width: int
) -> list[list[int]] | None:
    """Divide the columns into tables that fit, each with the first column.

    Returns:
        The numbers of the columns of each table; None: there is no such division.
    """

    def fits(part: Sequence[int]) -> bool:
        return _width([columns[i] for i in part], [cells[i] for i in part]) <= width

    parts = [[0]]
    for number in range(1, len(columns)):
        if fits([*parts[-1], number]):
            parts[-1].append(number)
        else:
            parts.append([0, number])
    return parts if all(map(fits, parts)) else None


def print_lines(lines: Sequence[tuple[str, Cell]], *, with_gap: bool = False) -> None:
    """Print each name and its value in one line; a long value continues in the next lines.

    Args:
        lines: Names and values.
        with_gap: Print an empty line first.
    """
    console = plain_console()
    name_width = max(cell_len(name) for name, _ in lines) + GAP
    if with_gap:
        console.print()
    for name, value in lines:
        style = value.style if isinstance(value, Text) else ""
        for i, part in enumerate(_wrapped(str(value), console.width - name_width)):
            label = Text((name if i == 0 else "").ljust(name_width), "bold")
            console.print(label + Text(part, style), soft_wrap=True)


def print_sentence(text: str, *, err: bool = False) -> None:
    """Print a sentence; break lines only between words.

    Args:
        text: The sentence.
        err: Print to standard error instead of standard output.
    """
    console = plain_console(err=err)
    for line in _wrapped(text, console.width):
        console.print(line, soft_wrap=True)


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(
        text, max(MIN_WIDTH, width), break_long_words=False, break_on_hyphens=False
    ) or [""]


def seconds(value: float) -> str:
    """Return a time with its unit, which is ms for times below a second."""
    if value < MIN_SHOWN_S:
        return "0"
    if value < 1:
        return f"{1000 * value:.3g} ms"
    return f"{value:,.1f} s" if value < 100 else f"{value:,.0f} s"
