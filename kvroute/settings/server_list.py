"""The addresses of attached servers, from the options and from a file that may change."""

from collections.abc import Sequence
from pathlib import Path

from pydantic_core import PydanticCustomError

from kvroute.settings import parsers

COMMENT = "#"


class ServerList:
    """The addresses; a file that cannot be read, or has a wrong line, counts as unchanged."""

    def __init__(self, urls: Sequence[str], file: Path | None) -> None:
        self._own = [*urls]
        self._file = file
        self._in_file: list[str] = []  # addresses in the file, as it was last read
        self.problem = ""  # why the file could not be used when it was last read; empty: it could

    def urls(self) -> list[str]:
        """Return all addresses, each once, in order."""
        if self._file is not None:
            try:
                self._in_file = parsers.checked_urls(_lines(self._file.read_text()))
                self.problem = ""
            except (OSError, UnicodeDecodeError, PydanticCustomError) as error:
                self.problem = str(error)
        return [*dict.fromkeys([*self._own, *self._in_file])]


def _lines(text: str) -> list[str]:
    lines = (line.partition(COMMENT)[0].strip() for line in text.splitlines())
    return [line for line in lines if line]
