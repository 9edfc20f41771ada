"""The URLs of attached servers (vLLM servers that the user runs), from options and a file."""

from collections.abc import Sequence
from pathlib import Path

from pydantic_core import PydanticCustomError

from kvroute.settings import parsers

COMMENT = "#"  # starts a comment in the file


class ServerList:
    """The URLs of attached servers.

    The file may change at any time. If it cannot be read, or has an invalid line, the URLs that
    were read last stay valid.
    """

    def __init__(self, urls: Sequence[str], file: Path | None) -> None:
        self._from_options = [*urls]
        self._file = file
        self._in_file: list[str] = []  # URLs in the file when it was last read without a problem
        self.problem = ""  # why the latest attempt to read the file failed; empty: it succeeded

    def urls(self) -> list[str]:
        """Read the file again and return all URLs: first those of the options, each once."""
        if self._file is not None:
            try:
                self._in_file = parsers.checked_urls(_lines(self._file.read_text()))
                self.problem = ""
            except (OSError, UnicodeDecodeError, PydanticCustomError) as error:
                self.problem = str(error)
        return [*dict.fromkeys([*self._from_options, *self._in_file])]


def _lines(text: str) -> list[str]:
    lines = (line.partition(COMMENT)[0].strip() for line in text.splitlines())
    return [line for line in lines if line]
