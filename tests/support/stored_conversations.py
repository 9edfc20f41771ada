"""Conversations on a Redis, for tests."""

from redis.asyncio import Redis

from kvroute.contract.unreadable import Unreadable
from kvroute.router.conversations.continuing import Conversations
from kvroute.router.conversations.objects import ConversationObjects
from kvroute.store.conversations.objects import ConversationStore
from kvroute.store.conversations.responses import Responses

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
    return Conversations(responses, objects, max_bytes=max_bytes)
