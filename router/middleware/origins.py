"""What somebody else's web page makes a browser send is refused.

A browser says where a request comes from, in headers that a page cannot choose: `Origin`,
`Sec-Fetch-Site`, `Host`. Other clients send none of the first two, and pass.

- A page of another origin gets a 403, unless its origin is allowed. A link to us may be followed.
- A stranger's name may come to mean this computer (DNS rebinding); its pages then seem to be ours.
  So a server that only this computer reaches, without keys, has no name but localhost and the hosts
  of allowed origins. IP addresses pass, which nobody can make to mean another computer. So does
  /health, which load balancers ask.
- A page can send three types of content without asking first: text/plain and multipart/form-data
  get a 415, though the fetch of some runtimes sends strings as text/plain. The message says to send
  application/json. `curl -d` calls its JSON a form, so forms are refused from browsers only.
"""

import re
from collections.abc import Callable, Collection, Mapping
from ipaddress import ip_address

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from kvroute.router.api.errors import ApiError, response, shown

ANY = "*"
MARKS = (b"host", b"origin", b"sec-fetch-site", b"sec-fetch-mode", b"sec-fetch-dest")
READ = frozenset({*MARKS, b"content-type"})
SAFE = ("GET", "HEAD", "OPTIONS")
METHODS = ("GET", "HEAD", "POST", "DELETE")  # of our routes
NO_JSON = ("text/plain", "multipart/form-data")
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
    """Adds the middlewares. allowed: origins, or `*`; their scripts may send any header, and read
    every answer. local_only: only this computer reaches us, and no key is needed. refused: called
    with each refusal."""
    if allowed:
        http.add_middleware(
            CORSMiddleware,
            allow_origins=[*allowed],
            allow_methods=METHODS,
            allow_headers=[ANY],
            expose_headers=[ANY],
        )
    http.add_middleware(Origins, allowed=allowed, local_only=local_only, refused=refused)


class Origins:
    """ASGI middleware; see above."""

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
        self._names = {_name(each.partition("://")[2]) for each in allowed if each != ANY}
        self._local_only = local_only
        self._refused = refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                self._check(scope)
            except ApiError as error:
                self._refused(error)
                await response(error, path=scope["path"])(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        headers = {
            name: value.decode("latin-1") for name, value in scope["headers"] if name in READ
        }
        if self._local_only and scope["path"] != "/health":
            self._check_name(headers.get(b"host", ""))
        self._check_page(scope["method"], headers)
        if scope["method"] not in SAFE:
            _check_content(headers)

    def _check_name(self, host: str) -> None:
        if is_local(host) or _name(host) in self._names:
            return
        raise ApiError(
            403,
            f"Host is {shown(host)}; without API keys this server answers to localhost and IP "
            "addresses only, since web pages could reach it by a name of theirs. Use 127.0.0.1, "
            "or start it with --api-keys or --insecure; for a container, with "
            "--allow-origin http://host.docker.internal:PORT",
            type="permission_error",
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
    """Whether pages of that origin come from this host. Their scheme may be another: TLS may end
    before us."""
    _, scheme_ends, own = origin.partition("://")
    return bool(scheme_ends) and _authority(own) == _authority(host)


def is_local(host: str) -> bool:
    """Whether a `Host` is an IP address, or a name that means this computer everywhere. One that is
    empty is of no browser."""
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
    """Whether somebody has followed a link, and will see the answer as a page of its own."""
    is_page = headers.get(b"sec-fetch-dest", "document") == "document"
    return method in SAFE and is_page and headers.get(b"sec-fetch-mode") == "navigate"


def _check_content(headers: Headers) -> None:
    kind = headers.get(b"content-type", "").partition(";")[0].strip().lower()
    is_of_browser = b"origin" in headers or b"sec-fetch-site" in headers
    if kind in NO_JSON or (kind == FORM and is_of_browser):
        raise ApiError(
            415,
            f"Content-Type is {kind}; send JSON, and `Content-Type: application/json`",
            code="unsupported_media_type",
        )


def _foreign(origin: str) -> ApiError:
    return ApiError(
        403,
        f"a web page of {origin[:200]} sends this, which may not use this server; start it with "
        "--allow-origin and the page's origin if it should",
        type="permission_error",
        code="foreign_origin",
    )
