"""Rejects requests that a browser sends for web pages of other sites.

A browser sends the origin of a request in headers that a page cannot change: `Origin`,
`Sec-Fetch-Site` and `Host`. Other clients do not send the first two, and are not restricted.

- A request from a page of another origin gets a 403, unless the origin is allowed. Following a link
  to this server is allowed.
- With DNS rebinding, an attacker's host name resolves to this machine, and the attacker's pages
  seem to have this server's origin. To prevent this, a server that has no keys and listens only
  locally checks the `Host` header. It accepts localhost and the hosts of allowed origins. It also
  accepts every IP address, because the attack needs a host name. /health accepts every host name,
  because load balancers may send any.
- A page can send three content types without a preflight request. Two of them, text/plain and
  multipart/form-data, get a 415. The error message says to send application/json, because some
  runtimes' `fetch` sends strings as text/plain by default. The third, a form, is rejected only from
  browsers, because `curl -d` sends JSON with the content type of a form.
"""

import re
from collections.abc import Callable, Collection, Mapping
from ipaddress import ip_address

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from kvroute.features import PATHS
from kvroute.router.api.errors import ApiError, path_of, response, shown

ANY = "*"  # in --allow-origin: every origin is allowed
ORIGIN_HEADERS = (b"host", b"origin", b"sec-fetch-site", b"sec-fetch-mode", b"sec-fetch-dest")
READ_HEADERS = frozenset({*ORIGIN_HEADERS, b"content-type"})
SAFE = ("GET", "HEAD", "OPTIONS")  # methods that change nothing
METHODS = ("GET", "HEAD", "POST", "DELETE")  # methods of the router's routes
NO_JSON = ("text/plain", "multipart/form-data")  # content types that are always rejected
UPLOADS = frozenset(PATHS.forms)  # the routes whose bodies are multipart/form-data
FORM = "application/x-www-form-urlencoded"
DEFAULT_PORT = re.compile(r":(80|443)?$")
PORT = re.compile(r":\d*$")

Headers = Mapping[bytes, str]


def guard(
    http: FastAPI,
    *,
    allowed: Collection[str],
    local_only: bool,
    refused: Callable[[ApiError], None],
) -> None:
    """Add the middlewares that check origins.

    Args:
        http: the application.
        allowed: the allowed origins, or `*` for all. Scripts of their pages may send any header and
            read every response.
        local_only: whether the server has no API keys and can be reached only from this machine.
        refused: called with each error.
    """
    if allowed:
        http.add_middleware(
            CORSMiddleware,
            allow_origins=[*allowed],
            allow_methods=METHODS,
            allow_headers=[ANY],
            expose_headers=[ANY],
            allow_private_network=True,  # of allowed pages, whose network this server may be in
        )
    http.add_middleware(Origins, allowed=allowed, local_only=local_only, refused=refused)


class Origins:
    """ASGI middleware that rejects requests from other sites; see the module's docstring."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        allowed: Collection[str],
        local_only: bool,
        refused: Callable[[ApiError], None],
    ) -> None:
        self._app = app
        self._allowed = frozenset(allowed)
        self._names = {_name(origin.partition("://")[2]) for origin in allowed if origin != ANY}
        self._local_only = local_only
        self._refused = refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                self._check(scope)
            except ApiError as error:
                self._refused(error)
                await response(error, path=path_of(scope))(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        headers = {
            name: value.decode("latin-1")
            for name, value in scope["headers"]
            if name in READ_HEADERS
        }
        if self._local_only and scope["path"] != "/health":
            self._check_name(headers.get(b"host", ""))
        self._check_page(scope["method"], headers)
        if scope["method"] not in SAFE and scope["path"].rstrip("/") not in UPLOADS:
            _check_content(headers)

    def _check_name(self, host: str) -> None:
        if is_local(host) or _name(host) in self._names:
            return
        raise ApiError(
            403,
            f"Host is {shown(host)}; without API keys this server accepts only localhost and IP "
            "addresses, since web pages could reach it by another host name (DNS rebinding). Use "
            "127.0.0.1, or start it with --api-keys or --insecure; for requests from a container, "
            "with --allow-origin http://host.docker.internal:PORT",
            code="unknown_host",
        )

    def _check_page(self, method: str, headers: Headers) -> None:
        origin, site = headers.get(b"origin"), headers.get(b"sec-fetch-site", "none")
        if site == "same-origin" or ANY in self._allowed:
            return
        if origin is None:
            if site != "none" and not _is_visit(method, headers):
                raise _foreign("another site")
        elif origin not in self._allowed and not is_own(origin, headers.get(b"host", "")):
            raise _foreign(origin)


def is_own(origin: str, host: str) -> bool:
    """Return whether an origin is this host.

    The scheme of the origin is ignored, since a proxy before the server may handle TLS.
    """
    _, separator, own = origin.partition("://")
    return bool(separator) and _authority(own) == _authority(host)


def is_local(host: str) -> bool:
    """Return whether a `Host` header is an IP address, a name for the local machine, or empty.

    An empty one is accepted, since no browser sends it.
    """
    name = _name(host)
    if name in ("", "localhost") or name.endswith(".localhost"):
        return True
    try:
        ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True


def _name(host: str) -> str:
    return PORT.sub("", host.lower()).removesuffix(".")


def _authority(host: str) -> str:
    return DEFAULT_PORT.sub("", host.lower())


def _is_visit(method: str, headers: Headers) -> bool:
    """Return whether a user follows a link, so that the browser shows the response as a page."""
    is_page = headers.get(b"sec-fetch-dest", "document") == "document"
    return method in SAFE and is_page and headers.get(b"sec-fetch-mode") == "navigate"


def _check_content(headers: Headers) -> None:
    kind = headers.get(b"content-type", "").partition(";")[0].strip().lower()
    is_from_browser = b"origin" in headers or b"sec-fetch-site" in headers
    if kind in NO_JSON or (kind == FORM and is_from_browser):
        raise ApiError(
            415,
            f"Content-Type is {kind}; send JSON with `Content-Type: application/json`",
            code="unsupported_media_type",
        )


def _foreign(origin: str) -> ApiError:
    return ApiError(
        403,
        f"web pages of {origin[:200]} may not use this server; to allow them, start it with "
        "--allow-origin and the page's origin",
        code="foreign_origin",
    )
