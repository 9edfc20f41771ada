"""Finds free ports on this computer."""

import os
import random
import socket
from collections import deque
from contextlib import suppress
from ipaddress import ip_address

# Ports to choose from. They are below Linux's ephemeral ports, which outgoing connections and Ray's
# servers use. So no connection takes a chosen port before its server listens on it.
PORTS = range(20_000, 30_000)

MAX_CLAIMS = 64  # maximum ports that a process reserves; to reserve more, it releases the oldest
_claims = deque[int]()  # file descriptors of the sockets that hold this process's reservations


def free_port() -> int:
    """Reserve and return a port that is free on all addresses.

    No other call on this computer returns the port until this process ends or has reserved
    MAX_CLAIMS more ports.
    """
    while True:
        port = random.choice(PORTS)
        if listen_error("", port) is None and _claim(port):
            return port


def reserve(host: str, port: int) -> socket.socket:
    """Keep other programs from listening on a port until the returned socket is closed."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    holder = socket.socket(family)
    with suppress(OSError):  # then the port is not reserved, or taken already
        holder.bind((host, port))
    return holder


def is_local(host: str) -> bool:
    """Return whether only this computer can reach the address."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _claim(port: int) -> bool:
    """Reserve the port; return False if another process has reserved it.

    The reservation is a name in Linux's abstract socket namespace. Only one process can have it,
    and it ends with that process.
    """
    claim = socket.socket(socket.AF_UNIX)
    try:
        claim.bind(f"\0kvroute-port-{port}")
    except OSError:
        claim.close()
        return False
    if len(_claims) == MAX_CLAIMS:
        os.close(_claims.popleft())
    _claims.append(claim.detach())
    return True


def listen_error(host: str, port: int) -> OSError | None:
    """Try to listen on the port. Return the error, or None if the port is free."""
    try:
        socket.create_server((host, port)).close()
    except OSError as error:
        return error
    return None
