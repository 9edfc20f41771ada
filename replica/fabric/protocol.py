"""The messages between a block server and a replica that pulls, and how they are sent in time.

A connection serves one pull:

    both     the TLS handshake, if the server uses TLS
    server   CHALLENGE: version, nonce
    puller   PROOF: proof, nonce, length of the request; then the request: `Wanted` in msgpack
    server   proof, and OPEN or REFUSED
             for each chain, in order, until the first block that is missing: HERE, the row's bytes,
             TRAILER: KEPT or CHANGED, and the row's checksum; GONE instead of HERE: it is missing

A row is the memory of one block. All numbers are little endian.
"""

import contextlib
import math
import socket
import ssl
import struct
import time
from collections.abc import Sequence

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

VERSION = 1
NONCE_BYTES = 16
PROOF_BYTES = 32
CHALLENGE = struct.Struct(f"<B{NONCE_BYTES}s")
PROOF = struct.Struct(f"<{PROOF_BYTES}s{NONCE_BYTES}sI")
WELCOME = struct.Struct(f"<{PROOF_BYTES}sc")
TRAILER = struct.Struct("<cQ")
OPEN, REFUSED, HERE, GONE, KEPT, CHANGED = b"O", b"R", b"H", b"G", b"K", b"C"
SERVER, PULLER = b"blocks", b"puller"  # senders of proofs (wire/framed_connection.py)
MAX_REQUEST = 4 << 20  # maximum size of a request in bytes; it has some 40 bytes for each block

_TIMEVAL = struct.Struct("ll")

Rows = NDArray[np.uint8]  # shape (blocks, bytes): the memory of all blocks
Row = NDArray[np.uint8]  # shape (bytes,)
Key = bytes  # identifies a block: the engine's hash of all its tokens and of what they depend on


class Wanted(Struct, array_like=True):
    """The request of a pull."""

    format: str  # the puller's EngineFacts.format
    within_s: float  # after this time, the puller reads nothing more
    # Each chain has the blocks of a prefix, in order. A block is useless without those before it.
    chains: list[list[Key]]


def checksum(row: Row) -> int:
    """Return a row's checksum. It detects accidents, not forgeries."""
    return xxh3_64_intdigest(row.data)


def shake_hands(peer: ssl.SSLSocket, deadline_s: float) -> None:
    """Make the TLS handshake. Raises the errors of `receive`; ssl.SSLError is one of them."""
    peer.settimeout(_left_s(deadline_s))
    peer.do_handshake()


def interrupt(peer: socket.socket) -> None:
    """End the connection at once, while another thread uses it."""
    with contextlib.suppress(OSError):
        # SSLSocket.shutdown would let the other thread read bytes that are not decrypted.
        socket.socket.shutdown(peer, socket.SHUT_RDWR)


def receive(peer: socket.socket, into: memoryview, deadline_s: float) -> None:
    """Fill `into`. The kernel waits for all of it, since Python would wait for each packet.

    With TLS, Python waits for each record, which has at most 16 KB.

    Args:
        peer: a socket. Without TLS, it has no timeout of Python's.
        into: bytes to fill.
        deadline_s: time.monotonic at which the wait ends.

    Raises:
        TimeoutError: the deadline has passed.
        OSError: the connection has ended.
    """
    while into:
        try:
            if isinstance(peer, ssl.SSLSocket):
                peer.settimeout(_left_s(deadline_s))
                count = peer.recv_into(into)
            else:
                _limit(peer, socket.SO_RCVTIMEO, deadline_s)
                count = peer.recv_into(into, 0, socket.MSG_WAITALL)
        except BlockingIOError:
            raise TimeoutError from None
        if not count:
            raise ConnectionResetError("the peer has closed the connection")
        into = into[count:]


def received(peer: socket.socket, size: int, deadline_s: float) -> bytes:
    """Return the next `size` bytes. Raises the errors of `receive`."""
    data = bytearray(size)
    receive(peer, memoryview(data), deadline_s)
    return bytes(data)


def send(peer: socket.socket, parts: Sequence[bytes | Row], deadline_s: float) -> None:
    """Send all parts in order. Raises the errors of `receive`."""
    for part in parts:
        rest = memoryview(part) if isinstance(part, bytes) else part.data
        while rest:
            try:
                if isinstance(peer, ssl.SSLSocket):
                    peer.settimeout(_left_s(deadline_s))
                else:
                    _limit(peer, socket.SO_SNDTIMEO, deadline_s)
                count = peer.send(rest)
            except BlockingIOError:
                raise TimeoutError from None
            rest = rest[count:]


def _limit(peer: socket.socket, option: int, deadline_s: float) -> None:
    """Limit the kernel's waits on this socket. Raises TimeoutError if the deadline has passed."""
    fraction, whole = math.modf(_left_s(deadline_s))
    # A time of 0 would mean no limit.
    peer.setsockopt(socket.SOL_SOCKET, option, _TIMEVAL.pack(int(whole), int(fraction * 1e6) or 1))


def _left_s(deadline_s: float) -> float:
    """Return the time until the deadline. Raises TimeoutError if it has passed."""
    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError
    return left_s
