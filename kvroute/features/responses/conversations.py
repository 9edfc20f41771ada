"""OpenAI's conversations: lists of items that responses read and extend.

A response that names a conversation has its items before its own input. When it is complete, its
input and its output are added to the conversation.
"""

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from kvroute.features.responses import LOCKED
from kvroute.features.responses.response_items import with_parts
from kvroute.features.responses.stores.conversation_store import (
    ConversationStore,
    Found,
    StoredConversation,
)
from kvroute.features.responses.stores.item_places import ItemPlaces
from kvroute.features.responses.stores.response_store import joined
from kvroute.router.api.call_limits import MAX_ITEMS, MAX_VALUES, values_in
from kvroute.router.api.errors import ApiError, needing_redis, shown
from kvroute.router.api.json_members import encode

TRIES = 8  # how often a change is tried if other requests change the conversation as well
PREFIX = "conv_"  # beginning of a conversation's id
ID_BYTES = 24
# Beginning of an item's id, by the item's type. Items of other types begin with OTHER_PREFIX.
ID_PREFIXES = {"message": "msg", "function_call": "fc", "reasoning": "rs"}
OTHER_PREFIX = "item"

Items = list[msgspec.Raw]
Change = Callable[[Found], tuple[StoredConversation, bytes]]

_raw_items = msgspec.json.Decoder(Items)
_objects = msgspec.json.Decoder(list[dict[str, Any]])


class ConversationObjects:
    """The conversations of one cluster, as one router reads and changes them.

    In the methods, `salt` is the owner's: a conversation can be used only with the salt that it was
    created with. They raise an ApiError if the conversation is unknown, or if Redis cannot be used.
    """

    def __init__(self, store: ConversationStore, places: ItemPlaces) -> None:
        self.store = store
        self.places = places

    async def create(
        self, items: Sequence[dict[str, Any]], metadata: dict[str, str], salt: str
    ) -> dict[str, Any]:
        """Store a new conversation, and return it."""
        id_ = f"{PREFIX}{secrets.token_hex(ID_BYTES)}"
        conversation = StoredConversation(
            int(time.time()), metadata, _ids(items, ()), values_in(items)
        )
        with needing_redis():
            if await self.store.put(id_, salt, conversation, encode(items)) == "too_large":
                raise _too_large(id_)
        await self._place(id_, conversation.ids, salt)
        return _as_object(id_, conversation)

    async def get(self, id_: str, salt: str) -> dict[str, Any]:
        """Return a conversation without its items."""
        return _as_object(id_, (await self.found(id_, salt)).conversation)

    async def update(self, id_: str, metadata: Mapping[str, str], salt: str) -> dict[str, Any]:
        """Replace the metadata of a conversation, and return it."""

        def change(found: Found) -> tuple[StoredConversation, bytes]:
            return replace(found.conversation, metadata=dict(metadata)), found.items

        return _as_object(id_, await self._changed(id_, salt, change))

    async def delete(self, id_: str, salt: str) -> None:
        """Delete a conversation."""
        with needing_redis():
            if not await self.store.delete(id_, salt):
                raise _unknown(id_)

    async def add(
        self, id_: str, items: Sequence[dict[str, Any]], salt: str
    ) -> list[dict[str, Any]]:
        """Add items at the end of a conversation, and return them as the API lists them.

        An item that the conversation has is not added again, and returned as it is there.
        """
        results = list[dict[str, Any]]()

        def change(found: Found) -> tuple[StoredConversation, bytes]:
            nonlocal results
            known = dict(zip(found.conversation.ids, _objects.decode(found.items), strict=True))
            new = [item for item in items if item.get("id") not in known]
            changed, encoded = _extended(found, new, encode(new))
            if len(changed.ids) > MAX_ITEMS["input"] or changed.values > MAX_VALUES:
                raise _too_large(id_)
            new_ids = iter(changed.ids[len(known) :])
            ids = [item["id"] if item.get("id") in known else next(new_ids) for item in items]
            shown = [known.get(name, item) for name, item in zip(ids, items, strict=True)]
            results = _listed(shown, ids)
            return changed, encoded

        await self._changed(id_, salt, change)
        await self._place(id_, [item["id"] for item in results], salt)
        return results

    async def append(
        self,
        id_: str,
        salt: str,
        items: Sequence[Mapping[str, Any]],
        encoded: bytes | msgspec.Raw,
    ) -> None:
        """Add the items of a response at the end of a conversation.

        Args:
            encoded: the items as a JSON array.
        """
        changed = await self._changed(id_, salt, lambda found: _extended(found, items, encoded))
        await self._place(id_, changed.ids[len(changed.ids) - len(items) :], salt)

    async def _place(self, id_: str, item_ids: Sequence[str], salt: str) -> None:
        """Let the items of a conversation be found by their ids."""
        with needing_redis():
            await self.places.put("conversation", id_, item_ids, salt)

    async def items(self, id_: str, salt: str) -> list[dict[str, Any]]:
        """Return all items of a conversation as the API lists them, the oldest first."""
        found = await self.found(id_, salt)
        return _listed(_objects.decode(found.items), found.conversation.ids)

    async def item(self, id_: str, item_id: str, salt: str) -> dict[str, Any]:
        """Return one item of a conversation."""
        found = await self.found(id_, salt)
        position = _position(id_, item_id, found.conversation)
        return _listed([_objects.decode(found.items)[position]], [item_id])[0]

    async def delete_item(self, id_: str, item_id: str, salt: str) -> dict[str, Any]:
        """Delete one item of a conversation, and return the conversation."""

        def change(found: Found) -> tuple[StoredConversation, bytes]:
            old = found.conversation
            position = _position(id_, item_id, old)
            items = _raw_items.decode(found.items)
            removed = msgspec.json.decode(items.pop(position))
            ids = old.ids[:position] + old.ids[position + 1 :]
            values = max(0, old.values - values_in([removed]))
            return replace(old, ids=ids, values=values), encode(items)

        return _as_object(id_, await self._changed(id_, salt, change))

    async def found(self, id_: str, salt: str) -> Found:
        """Return a conversation with its items."""
        with needing_redis():
            found = await self.store.get(id_, salt)
        if found is None:
            raise _unknown(id_)
        return found

    async def _changed(self, id_: str, salt: str, change: Change) -> StoredConversation:
        """Change a conversation, and return the new one."""
        for _ in range(TRIES):
            found = await self.found(id_, salt)
            conversation, items = change(found)
            conversation = replace(conversation, changes=found.conversation.changes + 1)
            with needing_redis():
                outcome = await self.store.put(id_, salt, conversation, items, replaced=found)
            if outcome == "stored":
                return conversation
            if outcome == "too_large":
                raise _too_large(id_)
        raise ApiError(
            409,
            f"other requests change the conversation {shown(id_)} all the time; send the request "
            "again",
            code=LOCKED,
        )


def _extended(
    found: Found, items: Sequence[Mapping[str, Any]], encoded: bytes | msgspec.Raw
) -> tuple[StoredConversation, bytes]:
    """Return a conversation and its items with more items at the end."""
    old = found.conversation
    ids, values = (*old.ids, *_ids(items, old.ids)), old.values + values_in(items)
    return replace(old, ids=ids, values=values), joined([found.items, encoded])


def _as_object(id_: str, conversation: StoredConversation) -> dict[str, Any]:
    return {
        "id": id_,
        "object": "conversation",
        "created_at": conversation.created_at,
        "metadata": conversation.metadata,
    }


def _ids(items: Sequence[Mapping[str, Any]], known: Sequence[str]) -> tuple[str, ...]:
    """Return an id for each new item: its own, or a new one if it has none or it is not unique."""
    seen, ids = set(known), []
    for item in items:
        id_ = item.get("id")
        if not isinstance(id_, str) or not id_ or id_ in seen:
            prefix = ID_PREFIXES.get(item.get("type", "message"), OTHER_PREFIX)
            id_ = f"{prefix}_{secrets.token_hex(ID_BYTES)}"
        seen.add(id_)
        ids.append(id_)
    return tuple(ids)


def _listed(items: Sequence[Mapping[str, Any]], ids: Sequence[str]) -> list[dict[str, Any]]:
    return [
        with_parts({"type": "message", "status": "completed", **item, "id": id_})
        for item, id_ in zip(items, ids, strict=True)
    ]


def _position(id_: str, item_id: str, conversation: StoredConversation) -> int:
    if item_id not in conversation.ids:
        raise ApiError(
            404,
            f"the conversation {shown(id_)} has no item {shown(item_id)}; "
            f"GET /v1/conversations/{id_}/items lists its items",
            code="not_found",
        )
    return conversation.ids.index(item_id)


def _unknown(id_: str) -> ApiError:
    return ApiError(
        404,
        f"Conversation with id {shown(id_)} not found: it has expired, was deleted or evicted, or "
        "has another cache_salt",
        param="conversation",
        code="not_found",
    )


def _too_large(id_: str) -> ApiError:
    return ApiError(
        413,
        f"the conversation {shown(id_)} would have more than {MAX_ITEMS['input']} items, "
        f"{MAX_VALUES} JSON values, the bytes of --max-body-mb, or a sixteenth of "
        "--response-store-mb; start a new conversation",
        param="conversation",
        code="request_too_large",
    )
