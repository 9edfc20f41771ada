"""Background responses that no stored response has the items of.

A response is stored when it is complete. Before that, and if it fails or is cancelled, its items
are found here: those of its request, and its output so far.
"""

from collections.abc import Callable
from typing import Any

import msgspec
from msgspec.structs import replace

from kvroute.contract.unreadable import DECODE_ERRORS
from kvroute.features.gate import Caller
from kvroute.features.responses import PREVIOUS_NOT_FOUND
from kvroute.features.responses.continuing import Conversations, input_of, turn_of
from kvroute.features.responses.items.compaction import without_trigger
from kvroute.features.responses.items.input_items import input_items, with_input
from kvroute.features.responses.items.reading import ItemReader
from kvroute.features.responses.response_items import PREVIOUS
from kvroute.features.responses.stores.background_store import BackgroundStore, Record
from kvroute.features.responses.stores.leased_values import TooLongError, key, owner
from kvroute.features.responses.stores.response_store import MAX_LINKS
from kvroute.router.api.calls import RESPONSES, Call, parse_call
from kvroute.router.api.errors import ApiError, invalid, needing_redis, shown
from kvroute.router.api.json_members import encode, members


class Unfinished:
    """The background responses of a cluster, as calls of one model continue and list them.

    Args:
        store: the background responses.
        conversations: the responses that are complete.
        reader: returns the reader of the items of a caller's requests, given their `cache_salt`.
    """

    def __init__(
        self,
        store: BackgroundStore,
        conversations: Conversations,
        reader: Callable[[Caller, str | None], ItemReader],
    ) -> None:
        self._store, self._conversations, self._reader = store, conversations, reader

    async def keep(self, call: Call) -> bool:
        """Store the response that a call continues, if it ran in the background and has ended.

        So are those that it continues. Later calls find them as they find all stored responses.

        Returns:
            Whether it is stored now.

        Raises:
            ApiError: it still runs, or Redis cannot be used.
        """
        waiting = [call]  # each of them continues a response that is not stored
        while waiting and len(waiting) <= MAX_LINKS:
            record = await self._found(waiting[-1])
            if record is None:
                return False
            if record.head.is_open:
                raise _running(record, waiting[-1].body[PREVIOUS])
            own = await self._call_of(record, call.caller)
            try:
                own = (await self._conversations.expand(own)).call
            except ApiError as error:
                if error.code != PREVIOUS_NOT_FOUND:
                    raise
                waiting.append(own)
                continue
            await self._put(record, own)
            waiting.pop()
        return not waiting

    async def input_items(self, record: Record, caller: Caller) -> list[dict[str, Any]]:
        """Return all input items up to a background response, the oldest first.

        Raises:
            ApiError: an earlier response is not there any more, or Redis cannot be used.
        """
        call = await self._call_of(record, caller)
        try:
            expanded = await self._conversations.expand(call)
        except ApiError as error:
            if error.code != PREVIOUS_NOT_FOUND or not await self.keep(call):
                raise
            expanded = await self._conversations.expand(call)
        items = (await input_of(_parsed(expanded.call))).items
        return msgspec.json.decode(items, type=list[dict[str, Any]])

    async def _found(self, call: Call) -> Record | None:
        """Return the response that a call continues."""
        salt = owner(call.caller, call.body.get("cache_salt"))
        with needing_redis():
            return await self._store.read(key(call.body[PREVIOUS], salt))

    async def _call_of(self, record: Record, caller: Caller) -> Call:
        """Return the request of a response, with items that replicas can read."""
        try:
            request = record.body(self._store.max_part_bytes).request
        except (*DECODE_ERRORS, TooLongError):
            raise ApiError(404, "the response cannot be read", code="not_found") from None
        call = replace(parse_call(RESPONSES, bytes(request)), caller=caller)
        reader = self._reader(caller, call.body.get("cache_salt"))
        if not reader.must_read(call):
            return call
        items, _ = without_trigger(await reader.read(input_items(call)))
        return with_input(call, items)

    async def _put(self, record: Record, call: Call) -> None:
        """Store a response, given its call with all items before its output."""
        response = members(record.body(self._store.max_part_bytes).response)
        response["status"] = msgspec.Raw(encode(record.head.status))
        id_, turn = turn_of(response, await input_of(_parsed(call)))
        salt = owner(call.caller, call.body.get("cache_salt"))
        with needing_redis():
            await self._conversations.responses.put(id_, salt, None, turn, encode(response))


def _parsed(call: Call) -> Call:
    """Return a call whose `raw` has been changed, with the body that belongs to it."""
    return parse_call(RESPONSES, call.raw)


def _running(record: Record, id_: object) -> ApiError:
    return invalid(
        PREVIOUS,
        f"Previous response with id {shown(id_)} cannot be continued yet: its status is "
        f"{record.head.status}. Wait until it has ended, or cancel it",
    )
