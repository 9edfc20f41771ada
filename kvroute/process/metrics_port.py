"""Serves a process's Prometheus metrics on a port of its own. Clients may need a token."""

import contextlib
import hmac
import logging
import os
import socket
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import REGISTRY, CollectorRegistry, make_wsgi_app
from prometheus_client.exposition import ThreadingWSGIServer

from kvroute.wire.strangers import Strangers

log = logging.getLogger("kvroute.metrics")

METRICS_HOST = "KVROUTE_METRICS_HOST"  # environment variable: address to serve metrics on
CLIENT_TIMEOUT_S = 30.0  # timeout of reading a client's request
# Connections at a time; each has a thread. Prometheus needs one, and sends its request at once.
MAX_CLIENTS = 32
ANY_PORT = (0,)  # stands for a range of ports; the system chooses a free port

Application = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


class NoMetricsError(Exception):
    """The metrics of a process cannot be served. The message has the reason and the remedy."""


class Exposition:
    """A server for the metrics of one registry. It listens at `address` until it is closed.

    Its host is METRICS_HOST if that is set. Otherwise it is the node's address in Ray's cluster, so
    that every machine of the cluster can read the metrics.

    Args:
        node: the node's address.
        registry: the metrics.
        ports: the server takes the first one that is free.
        token_file: file with a token that clients must send; None: they need none.

    Raises:
        NoMetricsError: no port is free, or the token file cannot be used.
    """

    def __init__(
        self,
        node: str,
        registry: CollectorRegistry = REGISTRY,
        *,
        ports: Sequence[int] = ANY_PORT,
        token_file: Path | None = None,
    ) -> None:
        host = os.environ.get(METRICS_HOST) or node
        application: Application = make_wsgi_app(registry)
        if token_file is not None:
            application = _guarded(application, read_token(token_file))
        self._server = _listening(host, ports, application)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        host = f"[{host}]" if ":" in host else host
        self.address = f"{host}:{self._server.server_port}"

    def close(self) -> None:
        """Stop the server."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def expose(
    node: str,
    registry: CollectorRegistry = REGISTRY,
    *,
    ports: Sequence[int],
    token_file: Path | None,
) -> Exposition | None:
    """Serve the metrics; if this is not possible, log a warning and return None."""
    try:
        return Exposition(node, registry, ports=ports, token_file=token_file)
    except NoMetricsError as error:
        log.warning("this process does not serve metrics: %s", error)
        return None


def read_token(file: Path) -> bytes:
    """Read the token from a file. Raises NoMetricsError if the file has none."""
    try:
        token = file.read_bytes().strip()
    except OSError as error:
        raise NoMetricsError(
            f"metrics_token_file is {str(file)!r}, which cannot be read ({error.strerror}); copy "
            "the file to every node, readable by the user who runs Ray"
        ) from None
    if not token or not token.isascii() or len(token.split()) > 1:
        raise NoMetricsError(
            f"metrics_token_file is {str(file)!r}, which has no token; write one word to it, for "
            "example the output of `openssl rand -hex 32`"
        )
    return token


def _guarded(application: Application, token: bytes) -> Application:
    """Wrap the application so that requests without the token are answered with 401."""
    expected = b"Bearer " + token

    def guarded(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        received = environ.get("HTTP_AUTHORIZATION", "").encode("latin-1")
        if hmac.compare_digest(received, expected):
            return application(environ, start)
        start("401 Unauthorized", [("WWW-Authenticate", "Bearer"), ("Content-Length", "0")])
        return []

    return guarded


def _listening(host: str, ports: Sequence[int], application: Application) -> WSGIServer:
    server_class = _ServerV6 if ":" in host else _Server
    for port in ports:
        try:
            return make_server(host, port, application, server_class, _Handler)
        except OSError as error:
            last = error
    if not ports[0]:
        raise NoMetricsError(
            f"cannot listen on {host} ({last.strerror}); set {METRICS_HOST} to an address of this "
            "node"
        )
    raise NoMetricsError(
        f"cannot listen on {host} on any of the {len(ports)} ports of metrics_port_range, "
        f"{ports[0]}-{ports[-1]} ({last.strerror}); set a wider range: one port for each process "
        "of a node, and for each model of a router"
    )


class _Server(ThreadingWSGIServer):
    allow_reuse_port = False  # two processes must not share a port

    def __init__(self, *args: Any) -> None:
        self._clients = Strangers[Any](MAX_CLIENTS)
        super().__init__(*args)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Start the thread of a connection; end the oldest one if there are too many."""
        if oldest := self._clients.add(request):
            with contextlib.suppress(OSError):
                oldest.shutdown(socket.SHUT_RDWR)  # its thread closes it
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection whose thread ends."""
        self._clients.discard(request)
        super().shutdown_request(request)


class _ServerV6(_Server):
    address_family = socket.AF_INET6


class _Handler(WSGIRequestHandler):
    timeout = CLIENT_TIMEOUT_S

    def log_message(self, *_: Any) -> None:
        """Log nothing, since there are many scrapes."""
