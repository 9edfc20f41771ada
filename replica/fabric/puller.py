"""Pulls blocks from another engine's block server into rows of this engine's host memory."""

import contextlib
import logging
import secrets
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from hashlib import sha256
from typing import NamedTuple

import msgspec

from kvroute.replica.fabric.protocol import (
    CHALLENGE,
    HERE,
    KEPT,
    NONCE_BYTES,
    OPEN,
    PROOF,
    PROOF_BYTES,
    PULLER,
    SERVER,
    TRAILER,
    VERSION,
    WELCOME,
    Key,
    Rows,
    Wanted,
    checksum,
    interrupt,
    receive,
    received,
    send,
    shake_hands,
)
from kvroute.replica.fabric.pull import Reason
from kvroute.wire.contexts import TlsEnd
from kvroute.wire.framed_connection import is_proof, proof
from kvroute.wire.tls import TlsError, explained

log = logging.getLogger("kvroute.replica")

# Maximum share of a pull's time for the connection. A peer whose host is down does not even refuse.
CONNECT_SHARE = 0.25


class Target(NamedTuple):
    """A row to fill with a block."""

    key: Key
    row: int


class PullEnd(NamedTuple):
    """What a pull has done."""

    arrived: list[Key]  # the blocks whose rows are filled
    took_s: float
    reason: Reason  # why the other rows are not filled


class PullRun:
    """One pull. `run` is called in a thread; `abort` may be called in another one."""

    def __init__(self, rows: Rows, chains: Sequence[Sequence[Target]]) -> None:
        """Prepare a pull.

        Args:
            rows: the host memory.
            chains: the blocks to pull. Without the first blocks of a chain, the others are useless.
        """
        self._rows, self._chains = rows, chains
        self._arrived: list[Key] = []
        self._lock = threading.Lock()
        self._peer: socket.socket | None = None
        self._is_aborted = False

    def abort(self) -> None:
        """End the pull soon. It still writes to its rows until `run` returns."""
        with self._lock:
            self._is_aborted = True
            if self._peer is not None:
                interrupt(self._peer)

    def run(
        self,
        address: str,
        *,
        key: bytes,
        format_: str,
        deadline_s: float,
        tls: Callable[[], TlsEnd | None] = lambda: None,
    ) -> PullEnd:
        """Pull, and return what has arrived. It raises no errors.

        Args:
            address: host:port of the peer's block server.
            key: pull_key of the peer.
            format_: the EngineFacts.format of this engine.
            deadline_s: time.monotonic at which the pull ends.
            tls: returns this engine's certificate; None: the peer does not use TLS.
        """
        began_s = time.monotonic()
        try:
            reason = self._run(address, key, format_, deadline_s, tls)
        except TimeoutError:
            reason = "late"
        except _DamagedError:
            reason = "damaged"
        except (ssl.SSLError, TlsError) as error:
            reason = "lost"
            if not self._is_aborted:
                log.warning("cannot pull from %s: %s", address, explained(error, peer="replica"))
        except (OSError, ValueError) as error:  # ValueError: the address is none
            reason = "lost"
            if not self._is_aborted:
                log.warning("a pull from %s has failed: %r", address, error)
        if self._is_aborted and reason:
            reason = "off"
        return PullEnd(self._arrived, time.monotonic() - began_s, reason)

    def _run(
        self,
        address: str,
        key: bytes,
        format_: str,
        deadline_s: float,
        tls: Callable[[], TlsEnd | None],
    ) -> Reason:
        with self._connected(address, deadline_s, tls()) as peer:
            if not self._open(peer, key, format_, deadline_s):
                return "refused"
            reasons = [self._receive_chain(peer, chain, deadline_s) for chain in self._chains]
            return next((reason for reason in reasons if reason), "")

    @contextlib.contextmanager
    def _connected(
        self, address: str, deadline_s: float, tls: TlsEnd | None
    ) -> Iterator[socket.socket]:
        host, _, port = address.rpartition(":")
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        plain = socket.create_connection((host, int(port)), timeout=CONNECT_SHARE * left_s)
        plain.settimeout(None)  # the kernel limits the waits: see protocol.receive
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with _encrypted(plain, tls) if tls else plain as peer:
            with self._lock:
                if self._is_aborted:
                    raise ConnectionAbortedError
                self._peer = peer
            try:
                if isinstance(peer, ssl.SSLSocket):
                    shake_hands(peer, deadline_s)
                yield peer
            finally:
                with self._lock:
                    self._peer = None

    def _open(self, peer: socket.socket, key: bytes, format_: str, deadline_s: float) -> bool:
        """Send the request, and return whether the peer serves it."""
        certificate = _certificate_of(peer)
        version, nonce = CHALLENGE.unpack(received(peer, CHALLENGE.size, deadline_s))
        if version != VERSION:
            return False
        chains = [[target.key for target in chain] for chain in self._chains]
        wanted = Wanted(format_, deadline_s - time.monotonic(), chains)
        body, own_nonce = msgspec.msgpack.encode(wanted), secrets.token_bytes(NONCE_BYTES)
        send(
            peer,
            [PROOF.pack(proof(key, PULLER, nonce, certificate), own_nonce, len(body)), body],
            deadline_s,
        )
        try:
            peer_proof, state = WELCOME.unpack(received(peer, WELCOME.size, deadline_s))
        except ConnectionError:
            return False  # the peer has rejected the proof, or has too many connections
        assert len(peer_proof) == PROOF_BYTES
        is_known = is_proof(peer_proof, key, SERVER, own_nonce, certificate)
        return is_known and bool(state == OPEN)

    def _receive_chain(
        self, peer: socket.socket, chain: Sequence[Target], deadline_s: float
    ) -> Reason:
        for target in chain:
            if received(peer, 1, deadline_s) != HERE:
                return "gone"
            row = self._rows[target.row]
            receive(peer, row.data, deadline_s)
            state, digest = TRAILER.unpack(received(peer, TRAILER.size, deadline_s))
            if state != KEPT:
                return "gone"
            if digest != checksum(row):
                raise _DamagedError
            self._arrived.append(target.key)
        return ""


def _encrypted(plain: socket.socket, tls: TlsEnd) -> socket.socket:
    """Return a socket for TLS, whose handshake is not made yet."""
    try:
        return tls.context.wrap_socket(plain, do_handshake_on_connect=False)
    except OSError:
        plain.close()
        raise


def _certificate_of(peer: socket.socket) -> bytes:
    """Return the digest of the peer's certificate; empty: there is no TLS."""
    certificate = peer.getpeercert(True) if isinstance(peer, ssl.SSLSocket) else None
    return sha256(certificate).digest() if certificate else b""


class _DamagedError(OSError):
    """The bytes that arrived are not those that were sent."""
