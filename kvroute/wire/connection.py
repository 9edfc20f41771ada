"""What both ends of a connection have in common: frames in and out, and how its loss is noticed."""

import asyncio
import hmac
import logging
import socket
from typing import cast

from kvroute.contract.unreadable import DECODE_ERRORS
from kvroute.wire.framing import Kind, Reader, frames

log = logging.getLogger("kvroute.wire")

HIGH_WATER = 1_000_000  # bytes that wait to be sent before a writer should pause
LOST_MS = 5_000  # a peer whose computer acknowledges nothing for so long is lost


class Connection(asyncio.Protocol):
    """One end. The kernel notices a peer whose computer or network is gone; a peer that hangs has a
    computer that still acknowledges."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.heard = 0  # messages
        self._reader = Reader()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport = cast("asyncio.Transport", transport)  # uvloop's is no subclass
        transport.set_write_buffer_limits(HIGH_WATER)
        _watch(transport.get_extra_info("socket"))

    def data_received(self, data: bytes) -> None:
        try:
            for kind, payload in self._reader.feed(data):
                self.heard += 1
                self.received(kind, payload)
        except DECODE_ERRORS as error:
            self.abort(f"a message that cannot be read: {error}")

    def received(self, kind: int, payload: bytes) -> None:
        """A message. One of DECODE_ERRORS ends the connection."""
        raise NotImplementedError

    def send(self, kind: Kind, payload: bytes) -> None:
        """Does nothing when the connection has ended."""
        if self.transport is None or self.transport.is_closing():
            return
        for frame in frames(kind, payload):
            self.transport.write(frame)

    def abort(self, reason: str, *, level: int = logging.WARNING) -> None:
        """Ends the connection without sending what waits."""
        log.log(level, "%s ends: %s", self, reason)
        if self.transport is not None:
            self.transport.abort()


def proof(secret: bytes, who: bytes, nonce: bytes) -> bytes:
    """Shows that its sender, "router" or "replica", knows the secret."""
    return hmac.digest(secret, who + nonce, "sha256")


def is_proof(given: bytes, secret: bytes, who: bytes, nonce: bytes) -> bool:
    return hmac.compare_digest(given, proof(secret, who, nonce))


def _watch(connected: socket.socket) -> None:
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, LOST_MS // 1000 - 1)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, LOST_MS)
