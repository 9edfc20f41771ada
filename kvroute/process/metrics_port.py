"""Each process serves its Prometheus metrics on its own port, to those who know the token."""

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

log = logging.getLogger("kvroute.metrics")

METRICS_HOST = "KVROUTE_METRICS_HOST"  # an environment variable: where metrics are served
CLIENT_S = 30.0  # how long a client may be silent
ANY_PORT = (0,)

Application = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


class NoMetricsError(Exception):
    """A process's metrics cannot be served; the message says why, and what to do."""


class Exposition:
    """Serves the metrics of one registry at `address`, until it is closed.

    It listens only on the node's address in the cluster, where those who can reach Ray can read
    the metrics too, or on METRICS_HOST; on the first free port. Clients send the token, if there is
    a file of one. Raises NoMetricsError.
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
        """Stops the server."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def exposed(
    node: str,
    registry: CollectorRegistry = REGISTRY,
    *,
    ports: Sequence[int],
    token_file: Path | None,
) -> Exposition | None:
    """An Exposition; None, and a line in the log, where there can be none: the process goes on."""
    try:
        return Exposition(node, registry, ports=ports, token_file=token_file)
    except NoMetricsError as error:
        log.warning("this process has no metrics: %s", error)
        return None


def read_token(file: Path) -> bytes:
    """The token in the file. Raises NoMetricsError when there is none."""
    try:
        token = file.read_bytes().strip()
    except OSError as error:
        raise NoMetricsError(
            f"metrics_token_file is {str(file)!r}, which cannot be read ({error.strerror}); every "
            "node needs it, readable for the user who runs Ray"
        ) from None
    if not token or not token.isascii() or len(token.split()) > 1:
        raise NoMetricsError(
            f"metrics_token_file is {str(file)!r}, which has no token; expected one word, as "
            "`openssl rand -hex 32` prints it"
        )
    return token


def _guarded(application: Application, token: bytes) -> Application:
    """A 401 for those who do not send the token."""
    expected = b"Bearer " + token

    def guarded(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        given = environ.get("HTTP_AUTHORIZATION", "").encode("latin-1")
        if hmac.compare_digest(given, expected):
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
        raise NoMetricsError(f"no port can be had on {host} ({last.strerror}); see {METRICS_HOST}")
    raise NoMetricsError(
        f"none of {len(ports)} ports of metrics_port_range, {ports[0]}-{ports[-1]}, can be had on "
        f"{host} ({last.strerror}); give a wider range: one port for each process of a node, and "
        "for each model of a router"
    )


class _Server(ThreadingWSGIServer):
    allow_reuse_port = False  # a port is one process's


class _ServerV6(_Server):
    address_family = socket.AF_INET6


class _Handler(WSGIRequestHandler):
    timeout = CLIENT_S

    def log_message(self, *_: Any) -> None:
        """Says nothing of each scrape."""
