"""Ports on this computer: is one free, and which is."""

import random
import socket

# Below those that Linux hands out by itself, so that in the seconds until a server binds its port
# nobody's outgoing connection, and none of Ray's many servers, gets it by chance.
QUIET = range(20_000, 30_000)


def free_port() -> int:
    """A port that nobody listens on, on any address."""
    while True:
        port = random.choice(QUIET)
        if why_not("", port) is None:
            return port


def why_not(host: str, port: int) -> OSError | None:
    """The error that listening there gives; None when the port can be had."""
    try:
        socket.create_server((host, port)).close()
    except OSError as error:
        return error
    return None
