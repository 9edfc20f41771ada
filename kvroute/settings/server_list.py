"""The URLs of attached servers (vLLM servers that the user runs), from all that names them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from kvroute.settings import parsers
from kvroute.settings.looked_up import looked_up

COMMENT = "#"  # starts a comment in the file


class NamesServers(Protocol):
    """Options that name attached servers."""

    @property
    def attach(self) -> Sequence[str]: ...
    @property
    def attach_file(self) -> Path | None: ...
    @property
    def attach_dns(self) -> Sequence[str]: ...


def names_servers(options: NamesServers) -> bool:
    """Return whether options name attached servers."""
    return bool(options.attach or options.attach_file or options.attach_dns)


def naming_only(*urls: str) -> dict[str, Any]:
    """Return values for all options that name attached servers, so that they name only these."""
    return {"attach": urls, "attach_file": None, "attach_dns": ()}


def listed_servers(options: NamesServers) -> "ServerList":
    """Return the servers that options name."""
    return ServerList(options.attach, options.attach_file, options.attach_dns)


class ServerList:
    """The URLs of attached servers.

    The file may change at any time. If it cannot be read, or has an invalid line, the URLs that
    were read last stay valid. If none were read before, those of the valid lines are taken.
    """

    def __init__(self, urls: Sequence[str], file: Path | None, names: Sequence[str] = ()) -> None:
        """Create a list.

        Args:
            urls: Addresses of servers.
            file: A file with addresses, one per line; None: there is none.
            names: DNS names with ports; each stands for all servers at its addresses.
        """
        self._from_options = [*urls]
        self._file = file
        self._names = [looked_up(name) for name in names]
        self._in_file: list[str] = []  # URLs in the file when it was last read without a problem
        self.problem = ""  # the error in the file when it was last read; empty: none

    @property
    def is_usable(self) -> bool:
        """Return whether the file has named a server when it was read."""
        return bool(self._in_file)

    def urls(self) -> list[str]:
        """Read the file again and return all URLs: first those of the options, each once.

        Addresses of DNS names are those that were found last.
        """
        if self._file is not None:
            try:
                lines = _lines(self._file.read_text())
            except (OSError, UnicodeDecodeError) as error:
                self.problem = str(error)
            else:
                self._take(lines)
        found = (url for name in self._names for url in name.urls())
        return [*dict.fromkeys([*self._from_options, *self._in_file, *found])]

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
