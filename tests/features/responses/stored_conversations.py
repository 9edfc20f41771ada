"""Conversations on a Redis, for tests."""

from types import SimpleNamespace
from typing import Any

from fastapi import Response
from redis.asyncio import Redis

from kvroute.contract.unreadable import Unreadable
from kvroute.features.expanded import Expanded
from kvroute.features.responses.background.unfinished import Unfinished
from kvroute.features.responses.continuing import Conversations
from kvroute.features.responses.conversations import ConversationObjects
from kvroute.features.responses.router_responses import RouterResponses
from kvroute.features.responses.stores.background_store import BackgroundStore
from kvroute.features.responses.stores.conversation_store import ConversationStore
from kvroute.features.responses.stores.response_store import Responses
from tests.support.router_parts import fake_base

MB = 1 << 20


def conversation_objects(
    client: Redis, *, limit_bytes: int = 16 * MB, max_bytes: int = MB
) -> ConversationObjects:
    """Return the conversations that clients create."""
    store = ConversationStore(
        client,
        unreadable=Unreadable(),
        limit_bytes=limit_bytes,
        ttl_s=60,
        max_bytes=max_bytes,
    )
    return ConversationObjects(store)


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
        side.unfinished = Unfinished(background, conversations)
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
