"""Finds free ports on this computer."""

import random
import socket
from ipaddress import ip_address

# Below Linux's ephemeral ports, so that no outgoing connection and none of Ray's many servers gets
# the port by chance in the seconds until a server binds it.
QUIET = range(20_000, 30_000)


def free_port() -> int:
    """A port that is free on all addresses."""
    while True:
        port = random.choice(QUIET)
        if why_not("", port) is None:
            return port


def is_local(host: str) -> bool:
    """Whether only this computer reaches the address."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def why_not(host: str, port: int) -> OSError | None:
    """The error of an attempt to listen there; None when the port is free."""
    try:
        socket.create_server((host, port)).close()
    except OSError as error:
        return error
    return None
