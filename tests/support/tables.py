"""Writes the generated tables into the documents; `make docs` runs this."""

from pathlib import Path

from tests.parts.all_parts import parts_table
from tests.parts.results import PAGE
from tests.support.documents import METRICS, SETTINGS
from tests.support.metrics_table import metrics_table
from tests.support.settings_table import settings_table


def replace_table(document: Path, table: str) -> None:
    """Replace the table in the document that has the same head."""
    head = table.splitlines()[0]
    before, _, after = document.read_text().partition(head)
    assert after, f"{document} has no table that begins with {head}"
    rest = after.splitlines(keepends=True)[1:]
    end = next((n for n, line in enumerate(rest) if not line.startswith("|")), len(rest))
    document.write_text(before + table.rstrip("\n") + "\n" + "".join(rest[end:]))


if __name__ == "__main__":
    replace_table(SETTINGS, settings_table())
    replace_table(METRICS, metrics_table())
    replace_table(PAGE, parts_table())
