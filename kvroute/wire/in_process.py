"""Connections whose two ends are in one process and one event loop. No socket carries them."""

import asyncio
from collections.abc import Callable
from itertools import count

IN_PROCESS = "in-process"  # the host of addresses that only this process can use

Accept = Callable[[], asyncio.Protocol]  # makes the server's end of a new connection

_numbers = count(1)
_listeners: dict[int, "Listener"] = {}  # port -> listener


class Listener:
    """A server that this process can connect to.

    Attributes:
        port: Number of this server, unique in this process.
    """

    def __init__(self, accept: Accept) -> None:
        self.accept = accept
        self.port = next(_numbers)
        _listeners[self.port] = self

    def close(self) -> None:
        """Stop listening. Connections stay open."""
        _listeners.pop(self.port, None)


def connect_here(client: asyncio.Protocol, port: int) -> None:
    """Connect to a server of this process. Raises ConnectionRefusedError if nobody listens."""
    if (listener := _listeners.get(port)) is None:
        raise ConnectionRefusedError(f"no server {port} listens in this process")
    server = listener.accept()
    ends = Pipe(client), Pipe(server)
    for end, other in (ends, ends[::-1]):
        end.other = other
    for end in ends:
        end.protocol.connection_made(end)


class Pipe(asyncio.Transport):
    """The transport of one end of a connection.

    The other end receives the data in the next iteration of the event loop. So data waits for one
    iteration only, and writing never has to be paused.
    """

    other: "Pipe"

    def __init__(self, protocol: asyncio.Protocol) -> None:
        super().__init__()
        self.protocol = protocol
        self._loop = asyncio.get_running_loop()
        self._written: list[bytes | bytearray | memoryview] = []
        self._is_closing = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._is_closing:
            return
        self._written.append(data)
        if len(self._written) == 1:
            self._loop.call_soon(self._deliver)

    def get_write_buffer_size(self) -> int:
        return sum(map(len, self._written))

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Do nothing, since writing is never paused."""

    def is_closing(self) -> bool:
        return self._is_closing

    def close(self) -> None:
        """End the connection after what was written has been delivered."""
        if not self._is_closing:
            self._is_closing = True
            self._loop.call_soon(self._end)

    def abort(self) -> None:
        """End the connection without delivering what was written."""
        self._written.clear()
        self.close()

    def _deliver(self) -> None:
        written, self._written = self._written, []
        if written and not self.other._is_closing:
            try:
                self.other.protocol.data_received(b"".join(written))
            except BaseException:  # a fault of the protocol ends its connection, as with a socket
                self.other.abort()
                raise

    def _end(self) -> None:
        self.protocol.connection_lost(None)
        self.other.close()
