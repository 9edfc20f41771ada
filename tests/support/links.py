"""A link to a block server that is slow, is cut, hangs, or changes bytes."""

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

PIECE_BYTES = 1 << 16


@dataclass(frozen=True)
class Faults:
    """What is wrong with a link. Positions count the bytes from the server to the puller."""

    bytes_per_s: float = float("inf")
    damaged_at: int | None = None  # a bit of the byte at this position is wrong
    cut_at: int | None = None  # the connection breaks at this position
    hangs_at: int | None = None  # nothing arrives from this position on


@dataclass
class Link:
    """A link that runs."""

    address: str  # pulls from this address go through the link
    sent_bytes: int = 0  # bytes that have gone from the server to pullers


@contextlib.contextmanager
def link(address: str, faults: Faults) -> Iterator[Link]:
    """Forward connections to an address."""
    is_over, threads = threading.Event(), list[threading.Thread]()
    with socket.create_server(("127.0.0.1", 0)) as server:
        own = Link(f"127.0.0.1:{server.getsockname()[1]}")

        def accept() -> None:
            while True:
                try:
                    puller, _ = server.accept()
                except OSError:
                    return
                thread = threading.Thread(
                    target=_serve, args=(own, puller, address, faults, is_over)
                )
                threads.append(thread)
                thread.start()

        accepting = threading.Thread(target=accept)
        accepting.start()
        try:
            yield own
        finally:
            is_over.set()
            server.shutdown(socket.SHUT_RDWR)
            accepting.join()
    for thread in threads:
        thread.join()


def _serve(
    own: Link, puller: socket.socket, address: str, faults: Faults, is_over: threading.Event
) -> None:
    host, port = address.rsplit(":", 1)
    with puller, contextlib.suppress(OSError), socket.create_connection((host, int(port))) as peer:
        back = threading.Thread(target=_forward, args=(puller, peer))
        back.start()
        _forward_badly(own, peer, puller, faults, is_over)
        for each in (peer, puller):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        back.join()


def _forward(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(PIECE_BYTES):
            target.sendall(data)


def _forward_badly(
    own: Link,
    source: socket.socket,
    target: socket.socket,
    faults: Faults,
    is_over: threading.Event,
) -> None:
    at, began_s = 0, time.monotonic()
    with contextlib.suppress(OSError):
        while data := bytearray(source.recv(PIECE_BYTES)):
            end = at + len(data)
            if faults.cut_at is not None and end > faults.cut_at:
                target.sendall(data[: faults.cut_at - at])
                return
            if faults.hangs_at is not None and end > faults.hangs_at:
                target.sendall(data[: faults.hangs_at - at])
                is_over.wait()
                return
            if faults.damaged_at is not None and at <= faults.damaged_at < end:
                data[faults.damaged_at - at] ^= 1
            target.sendall(data)
            at = end
            own.sent_bytes += len(data)
            left_s = began_s + at / faults.bytes_per_s - time.monotonic()
            if left_s > 0 and is_over.wait(left_s):
                return
