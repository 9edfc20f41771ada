"""Conversations on a Redis, for tests."""

import json
from collections.abc import AsyncIterator, Sequence
from types import SimpleNamespace
from typing import Any

from fastapi import Response
from fastapi.responses import StreamingResponse
from redis.asyncio import Redis
from starlette.types import Message

from kvroute.contract.unreadable import Unreadable
from kvroute.features.expanded import Expanded
from kvroute.features.responses.background.unfinished import Unfinished
from kvroute.features.responses.continuing import Conversations
from kvroute.features.responses.conversations import ConversationObjects
from kvroute.features.responses.router_responses import RouterResponses
from kvroute.features.responses.stores.background_store import BackgroundStore
from kvroute.features.responses.stores.conversation_store import ConversationStore
from kvroute.features.responses.stores.item_places import ItemPlaces
from kvroute.features.responses.stores.response_store import Responses
from tests.support.router_parts import fake_base

MB = 1 << 20


def conversation_objects(
    client: Redis, *, limit_bytes: int = 16 * MB, max_bytes: int = MB
) -> ConversationObjects:
    """Return the conversations that clients create."""
    limits: Any = {"limit_bytes": limit_bytes, "ttl_s": 60, "max_bytes": max_bytes}
    store = ConversationStore(client, unreadable=Unreadable(), **limits)
    places = ItemPlaces(client, unreadable=Unreadable(), **limits)
    return ConversationObjects(store, places)


def stored_conversations(
    client: Redis, responses: Responses, *, max_bytes: int = MB
) -> Conversations:
    """Return the conversations of one model, with these responses."""
    objects = conversation_objects(client, max_bytes=max_bytes)
    return Conversations(responses, objects)


def side_of(
    conversations: Conversations | None, background: BackgroundStore | None = None
) -> RouterResponses:
    """Return the feature's side in a router. None: the router does not store responses."""
    side = RouterResponses(fake_base())
    side.conversations = conversations
    if conversations and background:
        side.unfinished = Unfinished(background, conversations, side.reader)
    return side


def models_with(*each: Conversations | None) -> Any:
    """Return a router's models with these conversations, as routes use them."""
    sides = [side_of(conversations) for conversations in each]
    return SimpleNamespace(
        all=[SimpleNamespace(feature=lambda kind, side=side: side) for side in sides]
    )


async def finished(turn: Expanded, response: Response) -> Response:
    """Return what the client gets if replicas answer a turn with this response."""
    return await turn.finish(response) if turn.finish else response


async def streamed(turn: Expanded, events: Sequence[tuple[str, dict[str, Any]]]) -> list[Any]:
    """Return the events that the client of a stream gets if replicas send these, decoded."""

    async def stream() -> AsyncIterator[bytes]:
        for kind, more in events:
            told = json.dumps({"type": kind, **more}, separators=(",", ":"))
            yield f"event: {kind}\ndata: {told}\n\n".encode()

    sent = list[bytes]()

    async def send(message: Message) -> None:
        sent.append(message.get("body", b""))

    async def receive() -> Message:
        raise AssertionError("nobody leaves")

    response = await finished(turn, StreamingResponse(stream(), media_type="text/event-stream"))
    await response({"type": "http", "asgi": {"spec_version": "2.4"}}, receive, send)
    found = [event.partition(b"data: ") for event in b"".join(sent).split(b"\n\n")]
    decoded = [(head, json.loads(body)) for head, _, body in found if body]
    assert all(head == f"event: {told['type']}\n".encode() for head, told in decoded)
    return [told for _, told in decoded]
