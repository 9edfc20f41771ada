"""The HTTP client of one attached server."""

import errno
import os
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import cache
from http import HTTPStatus
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import httpx
import msgspec

QUESTION_S = 5.0  # timeout in seconds of a question; a generation has none
CONNECT_S = 5.0  # timeout in seconds of a new connection
# Seconds that an idle connection is kept. It is less than half of the 5 s after which vLLM's HTTP
# server closes one: a request that is sent just then has no answer.
KEEP_ALIVE_S = 2.0
JSON = {"content-type": "application/json"}

_LOST = (aiohttp.ClientError, TimeoutError, OSError)


class ServerLostError(Exception):
    """A server does not answer, or has stopped in the middle of an answer.

    Attributes:
        remedy: What the operator can do.
    """

    def __init__(self, reason: str, *, remedy: str = "start it") -> None:
        super().__init__(reason)
        self.remedy = remedy


class NoConnectionError(ServerLostError):
    """No connection to a server could be made, so nothing of a request was sent."""


class Reply(NamedTuple):
    """A whole answer."""

    status: int
    content: bytes

    @property
    def is_ok(self) -> bool:
        return self.status == HTTPStatus.OK

    def decoded(self) -> Any:
        """Return the JSON value. Raises one of DECODE_ERRORS if it is none."""
        return msgspec.json.decode(self.content)


class OpenReply:
    """An answer whose body is still being received."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self.status = response.status
        self.content_type = response.headers.get("content-type", "")
        self._response = response

    async def parts(self) -> AsyncIterator[bytes]:
        """Yield the body as it arrives. Raises ServerLostError."""
        try:
            async for part in self._response.content.iter_any():
                yield part
        except _LOST as error:
            raise _lost(error) from error


class ServerClient:
    """Connections to one server.

    Attributes:
        url: The server's address.
    """

    def __init__(
        self, url: str, headers: Mapping[str, str] | None = None, *, socket: Path | None = None
    ) -> None:
        """Create a client; the first request opens a connection.

        Args:
            url: The server's address.
            headers: Headers of every request.
            socket: The server's Unix socket; None: it is reached by its address.
        """
        self.url = url
        self._headers = dict(headers or {})
        self._socket = socket
        self._session: aiohttp.ClientSession | None = None

    async def get(self, path: str) -> Reply:
        """Ask a question. Raises ServerLostError.

        It is asked again if the server has closed an idle connection just then.
        """
        return await self._ask("GET", path, timeout=aiohttp.ClientTimeout(QUESTION_S))

    async def post(
        self, path: str, value: Any = None, headers: Mapping[str, str] | None = None
    ) -> Reply:
        """Send a JSON value, and wait for the answer without a limit. Raises ServerLostError."""
        body = b"" if value is None else msgspec.json.encode(value)
        return await self.post_body(path, body, {**JSON, **(headers or {})})

    async def post_body(self, path: str, body: bytes, headers: Mapping[str, str]) -> Reply:
        """Send a body, and wait for the answer without a limit. Raises ServerLostError."""
        return await self._ask("POST", path, data=body, headers=headers)

    @asynccontextmanager
    async def open(
        self, path: str, body: bytes | AsyncIterator[bytes], headers: Mapping[str, str]
    ) -> AsyncIterator[OpenReply]:
        """Send a body, and receive the answer as it comes.

        Leaving the context before the end ends the request at the server.

        Raises:
            NoConnectionError: No connection to the server could be made.
            ServerLostError: The server does not answer.
        """
        try:
            response = await self._opened().post(
                self.url + path, data=body, headers=headers, allow_redirects=False
            )
        except _LOST as error:
            raise _lost(error) from error
        async with response:
            yield OpenReply(response)

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()

    async def _ask(self, method: str, path: str, **options: Any) -> Reply:
        try:
            address = self.url + path
            async with self._opened().request(
                method, address, allow_redirects=False, **options
            ) as response:
                return Reply(response.status, await response.read())
        except _LOST as error:
            raise _lost(error) from error

    def _opened(self) -> aiohttp.ClientSession:
        """Return the session, which needs a running loop when it is created."""
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=self._connector(),
                headers=self._headers,
                skip_auto_headers=("accept-encoding", "user-agent"),
                cookie_jar=aiohttp.DummyCookieJar(),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
            )
        return self._session

    def _connector(self) -> aiohttp.BaseConnector:
        if self._socket is not None:
            return aiohttp.UnixConnector(str(self._socket), limit=0, keepalive_timeout=KEEP_ALIVE_S)
        certificates = _certificates() if self.url.startswith("https:") else False
        return aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S, ssl=certificates)


def _lost(error: BaseException) -> ServerLostError:
    """Return the error in words."""
    if isinstance(error, aiohttp.ConnectionTimeoutError):
        return NoConnectionError(f"no connection in {CONNECT_S:g} s")
    if isinstance(error, TimeoutError):
        return ServerLostError(f"nothing in {QUESTION_S:g} s")
    if isinstance(error, aiohttp.ClientConnectorError):
        cause = error.os_error
        if isinstance(cause, ssl.SSLError):  # its `errno` is a number of OpenSSL
            return _refused_handshake(cause)
        if cause.errno is not None and cause.errno in errno.errorcode:
            return NoConnectionError(os.strerror(cause.errno))
        return NoConnectionError(cause.strerror or str(cause) or "it has closed the connection")
    return ServerLostError(f"{type(error).__name__}: {error}".removesuffix(": "))


# OpenSSL's codes of certificates that are not accepted -> what the operator can do.
_REMEDIES = {
    9: "compare the clocks of both machines",  # not valid yet
    10: "renew the certificate",  # expired
    62: "use an address that the certificate has",  # another host name
    64: "use an address that the certificate has",  # another IP address
}
_UNTRUSTED = "set SSL_CERT_FILE to a file with the certificate of its authority"


def _refused_handshake(error: ssl.SSLError) -> NoConnectionError:
    """Return the error for a server with which no encrypted connection could be made."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return NoConnectionError(
            f"its certificate is not accepted: {error.verify_message}",
            remedy=_REMEDIES.get(error.verify_code, _UNTRUSTED),
        )
    reason = (error.reason or str(error)).replace("_", " ").lower()
    return NoConnectionError(
        f"TLS: {reason}", remedy="give its address as http://... if it serves without TLS"
    )


@cache
def _certificates() -> ssl.SSLContext:
    """Return the authorities that connections trust: those of SSL_CERT_FILE, or else certifi's.

    Raises:
        NoConnectionError: The file cannot be read.
    """
    try:
        return httpx.create_ssl_context()
    except OSError as error:
        path = os.environ.get("SSL_CERT_FILE")
        raise NoConnectionError(
            f"SSL_CERT_FILE is {path!r}: {error.strerror or error}",
            remedy="set it to a PEM file of certificates, or remove it",
        ) from error
