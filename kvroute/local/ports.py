"""Finds free ports on this computer."""

import os
import random
import socket
from collections import deque
from ipaddress import ip_address

# Below Linux's ephemeral ports, so that no outgoing connection and none of Ray's many servers gets
# the port by chance in the seconds until a server binds it.
QUIET = range(20_000, 30_000)

MOST_CLAIMS = 64
_claims = deque[int]()  # file descriptors


def free_port() -> int:
    """A port that is free on all addresses. No other call on this computer returns it, until this
    process ends or has asked for MOST_CLAIMS more."""
    while True:
        port = random.choice(QUIET)
        if why_not("", port) is None and _claim(port):
            return port


def is_local(host: str) -> bool:
    """Whether only this computer reaches the address."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _claim(port: int) -> bool:
    """Whether nobody else has claimed it. The claim is a name in Linux's abstract namespace: it is
    taken at once, by one process, and goes with it."""
    claim = socket.socket(socket.AF_UNIX)
    try:
        claim.bind(f"\0kvroute-port-{port}")
    except OSError:
        claim.close()
        return False
    if len(_claims) == MOST_CLAIMS:
        os.close(_claims.popleft())
    _claims.append(claim.detach())
    return True


def why_not(host: str, port: int) -> OSError | None:
    """The error of an attempt to listen there; None when the port is free."""
    try:
        socket.create_server((host, port)).close()
    except OSError as error:
        return error
    return None
