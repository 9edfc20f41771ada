"""A request has one id everywhere: the client's `x-request-id`, or a new one.

Ray Serve uses the header unchecked, or makes an id. It returns the id with every response, and adds
it to the log lines of every process that works on the request. This module adds the check: an id
that is not suitable for a log is removed before Serve sees it.
"""

import re
import uuid

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

HEADER = "x-request-id"
VALID = re.compile(rb"[!-~]{1,128}")  # printable ASCII without spaces


class ValidIds:
    """Removes the header unless there is exactly one and it is valid. It runs before Serve, which
    would respond with 500 to an id that is not UTF-8."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["headers"] = _validated(scope["headers"])
        await self._app(scope, receive, send)


def request_id(request: Request) -> str:
    return request.headers.get(HEADER) or uuid.uuid4().hex


def _validated(headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    ids = [value for name, value in headers if name == HEADER.encode()]
    if len(ids) == 1 and VALID.fullmatch(ids[0]):
        return headers
    return [each for each in headers if each[0] != HEADER.encode()]
