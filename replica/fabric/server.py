"""Serves the blocks of one engine's host memory to replicas that pull them.

The engine's steps take no part in this. A row is sent while the engine may evict its block. So the
server looks the block up again after it has sent the row, and says whether the row was still the
same.
"""

import contextlib
import logging
import secrets
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from kvroute.replica.fabric.protocol import (
    CHALLENGE,
    CHANGED,
    GONE,
    HERE,
    KEPT,
    MAX_REQUEST,
    NONCE_BYTES,
    OPEN,
    PROOF,
    PULLER,
    REFUSED,
    SERVER,
    TRAILER,
    VERSION,
    WELCOME,
    Key,
    Row,
    Rows,
    Wanted,
    checksum,
    interrupt,
    received,
    send,
    shake_hands,
)
from kvroute.wire.framed_connection import is_proof, proof
from kvroute.wire.server import PROOF_S
from kvroute.wire.strangers import Strangers
from kvroute.wire.tls import NO_HANDSHAKE, Ends, Refusals, TlsError, explained

log = logging.getLogger("kvroute.replica")

MAX_PULLS = 8  # pulls that one server serves at a time; they share the server's link
MAX_UNPROVEN = 64  # maximum number of connections without a proof
MAX_SERVED_S = 60.0  # maximum time of a pull in seconds, whatever the puller says

_decode = msgspec.msgpack.Decoder(Wanted).decode


class BlockPlace(NamedTuple):
    """Where a block is in host memory."""

    stay: object  # identifies the block's stay in the row; another object: it has left the row
    row: int  # index of the row of host memory


Find = Callable[[Key], BlockPlace | None]  # returns None if the block is missing or not complete


class BlockServer:
    """The block server of one engine, with a thread for each connection."""

    def __init__(
        self,
        host: str,
        ports: Sequence[int],
        *,
        key: bytes,
        format_: str,
        find: Find,
        rows: Rows,
        tls: Ends | None = None,
    ) -> None:
        """Listen on the first free port.

        Args:
            host: the address on which to listen.
            ports: the ports to try; 0: any free port.
            key: pulls must prove to know this key (pull.py: pull_key).
            format_: the EngineFacts.format of the engine; pulls with another one are refused.
            find: looks up a block; called in other threads.
            rows: the host memory.
            tls: returns the replica's certificate; None: connections are not encrypted.

        Raises:
            OSError: no port is free.
        """
        self._tls, self._refusals = tls, Refusals()
        self._key, self._format, self._find, self._rows = key, format_, find, rows
        self._pulls = threading.Semaphore(MAX_PULLS)
        self._peers: dict[threading.Thread, socket.socket] = {}
        # Those of _peers without a proof.
        self._unproven = Strangers[threading.Thread](MAX_UNPROVEN)
        self._is_closed = False
        self._socket = _listening(host, ports)
        name, port = self._socket.getsockname()[:2]
        self.address = f"{name}:{port}"
        self._accepting = threading.Thread(target=self._accept, daemon=True, name="block-server")
        self._accepting.start()

    def close(self) -> None:
        """Stop. When this returns, no thread reads host memory."""
        self._is_closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes `accept`, which `close` would not
        self._accepting.join()
        self._socket.close()
        for thread in list(self._peers):
            self._end(thread)
        del self._rows, self._find

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                peer, address = self._socket.accept()
            except OSError as error:
                if self._is_closed:
                    return
                log.warning("the block server cannot accept a connection: %s", error)
                time.sleep(PROOF_S)  # there are no free file descriptors, for example
                continue
            certificate = b""
            if self._tls is not None:
                try:
                    peer, certificate = _encrypted(peer, self._tls)
                except OSError as error:
                    self._refuse(address, error)
                    continue
            arguments = (peer, address, certificate)
            thread = threading.Thread(target=self._run, args=arguments, daemon=True, name="blocks")
            self._peers[thread] = peer
            oldest = self._unproven.add(thread)
            thread.start()
            if oldest is not None:
                self._end(oldest)

    def _end(self, thread: threading.Thread) -> None:
        """End a connection, and wait until its thread has ended."""
        if peer := self._peers.get(thread):
            interrupt(peer)
        thread.join()

    def _run(self, peer: socket.socket, address: object, certificate: bytes) -> None:
        try:
            with peer:
                peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._serve(peer, address, certificate)
        except (OSError, msgspec.MsgspecError):
            pass  # the puller has left, is too slow, or is none
        except Exception:
            log.exception("the block server has failed for one connection")
        finally:
            self._unproven.discard(threading.current_thread())
            self._peers.pop(threading.current_thread(), None)

    def _serve(self, peer: socket.socket, address: object, certificate: bytes) -> None:
        deadline_s = time.monotonic() + PROOF_S
        if isinstance(peer, ssl.SSLSocket):
            try:
                shake_hands(peer, deadline_s)
            except OSError as error:
                self._refuse(address, error)
                return
        nonce = secrets.token_bytes(NONCE_BYTES)
        send(peer, [CHALLENGE.pack(VERSION, nonce)], deadline_s)
        proven, puller_nonce, size = PROOF.unpack(received(peer, PROOF.size, deadline_s))
        if not is_proof(proven, self._key, PULLER, nonce, certificate) or size > MAX_REQUEST:
            return
        self._unproven.discard(threading.current_thread())
        wanted = _decode(received(peer, size, deadline_s))
        own_proof = proof(self._key, SERVER, puller_nonce, certificate)
        deadline_s = time.monotonic() + min(max(0.0, wanted.within_s), MAX_SERVED_S)
        if wanted.format != self._format or not self._pulls.acquire(blocking=False):
            send(peer, [WELCOME.pack(own_proof, REFUSED)], deadline_s)
            return
        try:
            send(peer, [WELCOME.pack(own_proof, OPEN)], deadline_s)
            for chain in wanted.chains:
                self._send_chain(peer, chain, deadline_s)
        finally:
            self._pulls.release()

    def _refuse(self, address: object, error: OSError) -> None:
        """Log why a puller cannot connect, unless it has just left."""
        if isinstance(error, TimeoutError):
            self._refusals.log(address, NO_HANDSHAKE.format(peer="puller"))
        elif isinstance(error, (ssl.SSLError, TlsError)) and not self._is_closed:
            self._refusals.log(address, explained(error, peer="puller"))

    def _send_chain(self, peer: socket.socket, chain: Sequence[Key], deadline_s: float) -> None:
        for key in chain:
            place = self._find(key)
            if place is None:
                send(peer, [GONE], deadline_s)
                return
            row = self._rows[place.row]
            digest = checksum(row)
            send(peer, [HERE, self._sent(row)], deadline_s)
            again = self._find(key)
            is_kept = again is not None and again.stay is place.stay
            send(peer, [TRAILER.pack(KEPT if is_kept else CHANGED, digest)], deadline_s)
            if not is_kept:
                return

    def _sent(self, row: Row) -> Row:
        """Return the row as it is sent. Tests replace this method."""
        return row


def _encrypted(peer: socket.socket, tls: Ends) -> tuple[ssl.SSLSocket, bytes]:
    """Return a socket for TLS, without its handshake, and the digest of the own certificate."""
    try:
        end = tls()
        return end.context.wrap_socket(
            peer, server_side=True, do_handshake_on_connect=False
        ), end.digest
    except OSError:
        peer.close()
        raise


def _listening(host: str, ports: Sequence[int]) -> socket.socket:
    taken = OSError("there are no ports")
    for port in ports:
        try:
            return socket.create_server((host, port), backlog=MAX_UNPROVEN)
        except OSError as error:
            taken = error
    raise taken
