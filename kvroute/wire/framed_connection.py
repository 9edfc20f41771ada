"""What both ends of a connection have in common: frames, authentication, loss detection."""

import asyncio
import hmac
import logging
import socket
from typing import cast

from kvroute.contract.unreadable import DECODE_ERRORS
from kvroute.wire.framing import MessageKind, Reader, frames

log = logging.getLogger("kvroute.wire")

HIGH_WATER = 1_000_000  # bytes in the write buffer above which asyncio calls pause_writing
LOST_MS = 5_000  # milliseconds without a TCP acknowledgement until the kernel disconnects


class Connection(asyncio.Protocol):
    """One end of a connection.

    The kernel detects that the peer's computer or network has failed. It does not detect a process
    that hangs, since that process's computer still acknowledges data.
    """

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.received_messages = 0  # number of received messages
        self._reader = Reader()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transport is not a subclass of asyncio.Transport.
        self.transport = transport = cast("asyncio.Transport", transport)
        transport.set_write_buffer_limits(HIGH_WATER)
        if connected := transport.get_extra_info("socket"):  # there is none within a process
            _configure(connected)

    def data_received(self, data: bytes) -> None:
        try:
            for kind, payload in self._reader.feed(data):
                self.received_messages += 1
                self.received(kind, payload)
        except DECODE_ERRORS as error:
            self.abort(f"received a message that cannot be read: {error}")

    def received(self, kind: int, payload: bytes) -> None:
        """Handle a message. If this raises one of DECODE_ERRORS, the connection is aborted."""
        raise NotImplementedError

    def send(self, kind: MessageKind, payload: bytes) -> None:
        """Send a message, or do nothing if the connection has ended."""
        if self.transport is None or self.transport.is_closing():
            return
        for frame in frames(kind, payload):
            self.transport.write(frame)

    def abort(self, reason: str, *, level: int = logging.WARNING) -> None:
        """End the connection at once and discard the write buffer."""
        log.log(level, "closing %s: %s", self, reason)
        if self.transport is not None:
            self.transport.abort()


def proof(secret: bytes, sender: bytes, nonce: bytes, certificate: bytes = b"") -> bytes:
    """Return the proof that the sender knows the secret.

    Args:
        secret: the replica's secret.
        sender: b"router" or b"replica".
        nonce: the random bytes that the other end sent as a challenge.
        certificate: digest of the replica's certificate; empty: the connection has no TLS. So a
            process between both ends, with a certificate of its own, cannot pass on their proofs.
    """
    return hmac.digest(secret, sender + nonce + certificate, "sha256")


def is_proof(
    received: bytes, secret: bytes, sender: bytes, nonce: bytes, certificate: bytes = b""
) -> bool:
    """Return whether the received bytes are the sender's proof for these values (see `proof`)."""
    return hmac.compare_digest(received, proof(secret, sender, nonce, certificate))


def _configure(connected: socket.socket) -> None:
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, LOST_MS // 1000 - 1)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, LOST_MS)
