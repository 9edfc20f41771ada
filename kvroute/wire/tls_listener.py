"""Accepts connections with TLS. Connections without TLS are accepted by asyncio's own server."""

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable
from functools import partial

from kvroute.wire.strangers import Strangers
from kvroute.wire.tls import NO_HANDSHAKE, Ends, Refusals, TlsError, explained

log = logging.getLogger("kvroute.wire")

BACKLOG = 100  # connections that the kernel keeps until they are accepted; asyncio's default
RETRY_S = 1.0  # pause after a connection could not be accepted, in seconds


class TlsListener:
    """Accepts connections, and makes the TLS handshake of each in a task of its own.

    asyncio's own server has no limit for the number of handshakes, and does not report failed ones.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        tls: Ends,
        protocol: Callable[[bytes], asyncio.Protocol],
        within_s: float,
        most: int,
    ) -> None:
        """Start to listen.

        Args:
            host: the address on which to listen.
            port: the port; 0: any free port.
            tls: returns the server's certificate.
            protocol: returns the protocol of a new connection. Its argument is the digest of the
                server's certificate.
            within_s: timeout of a handshake, in seconds.
            most: maximum number of handshakes at a time. One more ends the oldest.

        Raises:
            OSError: the port is not free.
        """
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.sockets = (socket.create_server((host, port), family=family, backlog=BACKLOG),)
        self.sockets[0].setblocking(False)
        self._tls, self._protocol = tls, protocol
        self._within_s, self._unproven = within_s, Strangers[asyncio.Task[None]](most)
        self._refusals = Refusals()
        self._handshakes = set[asyncio.Task[None]]()
        self._loop = asyncio.get_running_loop()
        self._accepting = self._loop.create_task(self._accept(), name="accept")

    def close(self) -> None:
        """Stop listening, and end all handshakes. Connections stay open."""
        for task in (self._accepting, *self._handshakes):
            task.cancel()

    async def wait_closed(self) -> None:
        """Wait until the tasks have ended."""
        await asyncio.gather(self._accepting, *self._handshakes, return_exceptions=True)

    async def _accept(self) -> None:
        with self.sockets[0] as listening:
            while True:
                try:
                    accepted, address = await self._loop.sock_accept(listening)
                except OSError as error:  # for example, there are no free file descriptors
                    log.warning("cannot accept a connection: %s", error)
                    await asyncio.sleep(RETRY_S)
                    continue
                task = self._loop.create_task(self._shake_hands(accepted, address))
                self._handshakes.add(task)
                task.add_done_callback(partial(self._ended, accepted))
                if oldest := self._unproven.add(task):
                    oldest.cancel()

    def _ended(self, accepted: socket.socket, task: asyncio.Task[None]) -> None:
        self._handshakes.discard(task)
        self._unproven.discard(task)
        if task.cancelled():  # perhaps before its first step, so that it has closed nothing
            accepted.close()

    async def _shake_hands(self, accepted: socket.socket, address: object) -> None:
        is_connected = False
        try:
            async with asyncio.timeout(self._within_s):
                end = await asyncio.to_thread(self._tls)  # it may read files
                await self._loop.connect_accepted_socket(
                    lambda: self._protocol(end.digest),
                    accepted,
                    ssl=end.context,
                    ssl_handshake_timeout=2 * self._within_s,  # the timeout above comes earlier
                    ssl_shutdown_timeout=self._within_s,
                )
            is_connected = True
        except TimeoutError:
            self._refusals.log(address, NO_HANDSHAKE.format(peer="router"))
        except (ssl.SSLError, TlsError) as error:
            self._refusals.log(address, explained(error, peer="router"))
        except OSError:
            pass  # the peer has left
        finally:
            if not is_connected:
                accepted.close()
