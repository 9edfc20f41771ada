"""Runs commands in a terminal of 80 columns, with short and with long names."""

from typer.testing import CliRunner

from kvroute.cli import app

WIDTH = 80
SHORT, LONG = "9bbumjjb", "a-name-of-" + 9 * "ten-chars-"
NAMES = (SHORT, LONG)


def shown(*words: str) -> str:
    result = CliRunner().invoke(app, words, env={"COLUMNS": str(WIDTH)})
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.output


def is_whole(text: str, *words: str) -> bool:
    """Whether the text has every word whole, and only lines of one word are too long."""
    lines = [line.split() for line in text.splitlines() if len(line.rstrip()) > WIDTH]
    assert all(len(line) <= 3 for line in lines), lines
    return {*words} <= {*text.split()} and "…" not in text
