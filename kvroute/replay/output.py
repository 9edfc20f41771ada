"""The folder of an output file is checked before a command works for minutes."""

from pathlib import Path

import typer


def check_folder(path: Path | None) -> Path | None:
    """Returns the path. Raises BadParameter when no file can be written there."""
    if path is not None and not path.parent.is_dir():
        raise typer.BadParameter(f"{str(path)!r} is in a folder that does not exist; make it first")
    if path is not None and path.is_dir():
        raise typer.BadParameter(f"{str(path)!r} is a folder; name a file in it")
    return path
