"""Where an item is stored: in which response, or in which conversation.

With these values, an item can be found by its id alone. They are leased values (leased_values.py)
of the cluster: kvroute:{CLUSTER/}:items. The first part of a value is the id of the response or of
the conversation. The second part is empty.
"""

import asyncio
from collections.abc import Sequence
from typing import Literal, get_args

from kvroute.features.responses.stores.leased_values import FIRST, LeasedStore, key
from kvroute.store.connection import with_timeout

Place = Literal["response", "conversation"]
PLACES: tuple[Place, ...] = get_args(Place)  # in the order in which an item is looked for
# Of the items that a response or a conversation gets at once, so many of the newest can be found by
# their ids. Each takes a call to Redis, and a turn of an agent has far fewer.
MAX_PLACED = 128


class ItemPlaces(LeasedStore):
    """The places of the items of one cluster."""

    NAME = "items"

    @with_timeout
    async def put(self, place: Place, place_id: str, item_ids: Sequence[str], salt: str) -> None:
        """Store that items are in a response or in a conversation."""
        encoded = place_id.encode(errors="surrogatepass")
        puts = (
            self.put_value(_key(place, item_id, salt), encoded, b"")
            for item_id in item_ids[-MAX_PLACED:]
        )
        await asyncio.gather(*puts)

    @with_timeout
    async def find(self, place: Place, item_id: str, salt: str) -> str | None:
        """Return the id of the response or the conversation that has an item; None: none has it."""
        found = await self.part(_key(place, item_id, salt), FIRST)
        return None if found is None else found.decode(errors="replace")


def _key(place: Place, item_id: str, salt: str) -> bytes:
    return key(f"{place} {item_id}", salt)
