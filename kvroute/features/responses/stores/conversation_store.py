"""Stored conversations: lists of items that many responses read and extend.

They are leased values (leased_values.py) of the cluster, since a conversation may have responses of
several models: kvroute:{CLUSTER/}:conversations. The first part of a value is a StoredConversation,
and the second part its items. Both are JSON, compressed with zlib.
"""

from collections.abc import Sequence

import msgspec

from kvroute.contract.records import VERSION, Count, Versioned, check_version, encode
from kvroute.contract.unreadable import DECODE_ERRORS, UnreadableError
from kvroute.features.responses import CONVERSATION
from kvroute.features.responses.stores.leased_values import (
    LeasedStore,
    TooLongError,
    Written,
    decompressed,
    key,
    packed,
    unpacked,
)
from kvroute.store.connection import with_timeout


class StoredConversation(msgspec.Struct, frozen=True):
    """All of a conversation but its items."""

    created_at: Count  # Unix time in seconds
    metadata: dict[str, str] = {}
    ids: tuple[str, ...] = ()  # the id of each item
    values: Count = 0  # number of JSON values in all items
    changes: Count = 0  # how often it has been changed, so that each change has another first part
    version: int = VERSION


class Found(msgspec.Struct, frozen=True):
    """A conversation as it was read."""

    conversation: StoredConversation
    items: bytes  # JSON array of the items
    first: bytes  # the first part of its value, with which `put` detects changes by others


_conversations = msgspec.json.Decoder(StoredConversation)
_items = msgspec.json.Decoder(list[msgspec.Raw])
_versions = msgspec.json.Decoder(Versioned)


class ConversationStore(LeasedStore):
    """The stored conversations of one cluster."""

    NAME = "conversations"

    @with_timeout
    async def get(self, id: str, salt: str) -> Found | None:  # noqa: A002
        """Return a conversation; None if it is missing, expired or unreadable.

        Its lease is extended.
        """
        if not (parts := await self.get_value(key(id, salt))):
            return None
        try:
            conversation, items = await unpacked(_unpack, parts, self.max_bytes)
        except (*DECODE_ERRORS, TooLongError) as error:
            self.unreadable.add(CONVERSATION, id, error)
            return None
        return Found(conversation, items, parts[0])

    @with_timeout
    async def put(
        self,
        id: str,  # noqa: A002
        salt: str,
        conversation: StoredConversation,
        items: bytes,
        *,
        replaced: Found | None = None,
    ) -> Written:
        """Store a conversation.

        The least recently used conversations are removed until it fits.

        Args:
            items: JSON array of the conversation's items.
            replaced: the conversation that it replaces; None: it is a new one. The result is
                "known" if another request has changed it since it was read.
        """
        if len(items) > self.max_bytes:
            return "too_large"
        first, second = await packed(encode(conversation)), await packed(items)
        old = b"" if replaced is None else replaced.first
        return await self.put_value(key(id, salt), first, second, replaced=old)

    @with_timeout
    async def delete(self, id: str, salt: str) -> bool:  # noqa: A002
        """Delete a conversation; return whether there was one."""
        return await self.delete_value(key(id, salt))


def _unpack(parts: Sequence[bytes], max_bytes: int) -> tuple[StoredConversation, bytes]:
    head, items = (decompressed(part, max_bytes) for part in parts)
    check_version(_versions, head)
    conversation = _conversations.decode(head)
    if len(_items.decode(items)) != len(conversation.ids):
        raise UnreadableError("it has not as many items as ids")
    return conversation, items
