"""The URLs of attached servers (vLLM servers that the user runs), from options and a file."""

from collections.abc import Sequence
from pathlib import Path

from kvroute.settings import parsers

COMMENT = "#"  # starts a comment in the file


class ServerList:
    """The URLs of attached servers.

    The file may change at any time. If it cannot be read, or has an invalid line, the URLs that
    were read last stay valid. If none were read before, those of the valid lines are taken.
    """

    def __init__(self, urls: Sequence[str], file: Path | None) -> None:
        self._from_options = [*urls]
        self._file = file
        self._in_file: list[str] = []  # URLs in the file when it was last read without a problem
        self.problem = ""  # the error in the file when it was last read; empty: none

    @property
    def is_usable(self) -> bool:
        """Return whether the file has named a server when it was read."""
        return bool(self._in_file)

    def urls(self) -> list[str]:
        """Read the file again and return all URLs: first those of the options, each once."""
        if self._file is not None:
            try:
                lines = _lines(self._file.read_text())
            except (OSError, UnicodeDecodeError) as error:
                self.problem = str(error)
            else:
                self._take(lines)
        return [*dict.fromkeys([*self._from_options, *self._in_file])]

    def _take(self, lines: Sequence[str]) -> None:
        self.problem, urls = "", list[str]()
        for line in lines:
            try:
                urls += parsers.checked_urls([line])
            except ValueError as error:
                self.problem = f"the line {line!r} is not used ({error})"
        if not self.problem or not self._in_file:
            self._in_file = urls


def _lines(text: str) -> list[str]:
    lines = (line.partition(COMMENT)[0].strip() for line in text.splitlines())
    return [line for line in lines if line]
