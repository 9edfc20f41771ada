"""Looks up, again and again, which servers a DNS name stands for."""

import logging
import socket
import threading
import time
from functools import cache

log = logging.getLogger("kvroute.attached")

LOOKUP_S = 1.0  # seconds between two lookups
FIRST_LOOKUP_S = 10.0  # seconds to wait for the first lookup


class LookedUpServers:
    """The servers behind NAME:PORT, which a thread looks up, since a lookup can take seconds.

    If a lookup fails, or finds no address, the servers stay as they were found last.

    Attributes:
        problem: Why the last lookup has found nothing; empty: it has found servers.
    """

    def __init__(self, name: str) -> None:
        """Begin to look NAME:PORT up, and wait for the first answer, but not for ever."""
        self.problem = "the first lookup has not ended"
        self._host, _, self._port = name.rpartition(":")
        self._urls: list[str] = []
        self._has_answer = threading.Event()
        threading.Thread(target=self._follow, name=f"look up {name}", daemon=True).start()
        self._has_answer.wait(FIRST_LOOKUP_S)

    def urls(self) -> list[str]:
        """Return the URLs of the servers that were found last, in a fixed order."""
        return self._urls

    def _follow(self) -> None:
        while True:
            self._look_up()
            self._has_answer.set()
            time.sleep(LOOKUP_S)

    def _look_up(self) -> None:
        try:
            found = socket.getaddrinfo(self._host, int(self._port), type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            problem = str(error)
        else:
            # A server with addresses of both families counts once.
            families = {family for family, *_ in found}
            family = socket.AF_INET if socket.AF_INET in families else socket.AF_INET6
            addresses = {str(each[4][0]) for each in found if each[0] == family}
            self._urls = [self._url(address) for address in sorted(addresses)]
            problem = ""
        if problem and problem != self.problem:
            log.warning("%s is not found (%s); its servers stay as they are", self._host, problem)
        self.problem = problem

    def _url(self, address: str) -> str:
        host = f"[{address}]" if ":" in address else address
        return f"http://{host}:{self._port}"


@cache
def looked_up(name: str) -> LookedUpServers:
    """Return the servers behind NAME:PORT; a process has one thread for each name."""
    return LookedUpServers(name)
