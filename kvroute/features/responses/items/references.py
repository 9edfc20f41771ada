"""Finds the stored items that clients name by their ids (`item_reference`)."""

import asyncio
import re
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from kvroute.contract.unreadable import DECODE_ERRORS
from kvroute.features.responses.response_items import listed_id
from kvroute.features.responses.stores.conversation_store import ConversationStore
from kvroute.features.responses.stores.item_places import PLACES, ItemPlaces, Place
from kvroute.features.responses.stores.leased_values import TooLongError
from kvroute.features.responses.stores.response_store import Responses, joined
from kvroute.router.api.errors import ApiError, needing_redis, shown

Item = dict[str, Any]
Listed = Literal["listed"]  # an item of the input of a response, by the id that its list shows
LISTED: Listed = "listed"
LISTED_ID = re.compile(r"msg_(.+)_\d+")  # such an id: see listed_id

_objects = msgspec.json.Decoder(list[Item])


class References:
    """The items in the responses of one model and in all conversations, by their ids."""

    def __init__(
        self, places: ItemPlaces, responses: Responses, conversations: ConversationStore
    ) -> None:
        self.places = places
        self._responses = responses
        self._conversations = conversations

    async def find(self, ids: Sequence[str], salt: str) -> dict[str, Item]:
        """Return the items with these ids, which the owner with this salt has stored.

        Raises:
            ApiError: an item is not stored, the items are too long together, or Redis cannot be
                used.
        """
        found, left = dict[str, Item](), self._responses.max_bytes
        with needing_redis():
            for place in (*PLACES, LISTED):
                missing = [id_ for id_ in ids if id_ not in found]
                finds = (self._place(place, id_, salt) for id_ in missing)
                for place_id in dict.fromkeys(filter(None, await asyncio.gather(*finds))):
                    items, size = await self._items(place, place_id, salt)
                    left -= size
                    if left < 0:
                        raise too_long()
                    found |= {id_: {**items[id_], "id": id_} for id_ in items.keys() & missing}
        for id_ in ids:
            if id_ not in found:
                raise unknown(id_)
        return found

    async def _place(self, place: Place | Listed, id_: str, salt: str) -> str | None:
        """Return the id of the response or the conversation that may have an item."""
        if place == LISTED:
            listed = LISTED_ID.fullmatch(id_)
            return listed[1] if listed else None
        return await self.places.find(place, id_, salt)

    async def _items(
        self, place: Place | Listed, place_id: str, salt: str
    ) -> tuple[dict[str, Item], int]:
        """Return the items of a response or a conversation by their ids, and their size."""
        try:
            ids, items = await self._read(place, place_id, salt)
            decoded = _objects.decode(items)
        except TooLongError:
            raise too_long() from None
        except DECODE_ERRORS:  # another program has written what is stored
            return {}, 0
        names: Sequence[Any] = ids or [item.get("id") for item in decoded]
        if place == LISTED:
            names = [listed_id(place_id, number) for number in range(len(decoded))]
        named = zip(names, decoded, strict=True)
        return {name: item for name, item in named if isinstance(name, str)}, len(items)

    async def _read(
        self, place: Place | Listed, place_id: str, salt: str
    ) -> tuple[Sequence[str], bytes]:
        """Return the JSON of a place's items, and their ids if these are stored beside them."""
        if place == "conversation":
            found = await self._conversations.get(place_id, salt)
            return (found.conversation.ids, found.items) if found else ((), b"[]")
        if place == LISTED:
            turns = await self._responses.conversation(place_id, salt)
        else:
            turns = [turn] if (turn := await self._responses.turn(place_id, salt)) else []
        return (), joined([turn.items for turn in turns])


def unknown(id_: str, otherwise: str = "") -> ApiError:
    """Return the error for the id of an item that is not stored."""
    reason = otherwise or (
        "its response or conversation was not stored, has expired, was deleted or evicted, or has "
        "another cache_salt"
    )
    return ApiError(
        404,
        f"Item with id {shown(id_)} not found: {reason}; send the item itself",
        param="input",
        code="not_found",
    )


def too_long() -> ApiError:
    """Return the error for references to more than a body may have."""
    return ApiError(
        413,
        "the items that the input refers to are too long together; send fewer references, or raise "
        "--max-body-mb",
        param="input",
        code="request_too_large",
    )
