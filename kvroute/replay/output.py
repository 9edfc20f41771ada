"""Checks the path of an output file before a command works for minutes."""

from pathlib import Path

import typer


def check_folder(path: Path | None) -> Path | None:
    """Return the path. Raise BadParameter if no file can be written to it."""
    if path is not None and not path.parent.is_dir():
        raise typer.BadParameter(
            f"{str(path)!r} is in a folder that does not exist; create it first"
        )
    if path is not None and path.is_dir():
        raise typer.BadParameter(f"{str(path)!r} is a folder; name a file in it")
    return path
