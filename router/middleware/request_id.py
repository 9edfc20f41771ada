"""The id of a request: the client's `x-request-id` if it is valid, else a new id.

Ray Serve uses the header without checking it, or creates an id. It returns the id with every
response, and adds it to the log lines of every process that works on the request. This module
removes ids that are not suitable for logs before Serve reads them.
"""

import re
import uuid

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

HEADER = "x-request-id"
VALID = re.compile(rb"[!-~]{1,128}")  # printable ASCII without spaces


class ValidIds:
    """ASGI middleware that removes the header if it is not valid or occurs more than once.

    It runs before Serve, which would respond with 500 to an id that is not UTF-8.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["headers"] = _validated(scope["headers"])
        await self._app(scope, receive, send)


def request_id(request: Request) -> str:
    """Return the id of a request."""
    return request.headers.get(HEADER) or uuid.uuid4().hex


def _validated(headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    ids = [value for name, value in headers if name == HEADER.encode()]
    if len(ids) == 1 and VALID.fullmatch(ids[0]):
        return headers
    return [header for header in headers if header[0] != HEADER.encode()]
