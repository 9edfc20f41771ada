"""Gives each request an id, and each response the id of its request, as Ray Serve does."""

import uuid

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvroute.router.middleware.request_id import HEADER

NAME = HEADER.encode()


class AnsweredIds:
    """ASGI middleware behind ValidIds: a request has at most one id then, which is valid."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        id_ = dict(scope["headers"]).get(NAME)
        if id_ is None:
            id_ = uuid.uuid4().hex.encode()
            scope["headers"] = [*scope["headers"], (NAME, id_)]

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (NAME, id_)]
            await send(message)

        await self._app(scope, receive, send_with_id)
