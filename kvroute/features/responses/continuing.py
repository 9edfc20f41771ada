"""Conversations of the Responses API. They are stored in Redis, so any router can continue them.

A call continues a previous response, or a conversation that the client has created. Replicas do not
know that conversations are stored. A replica gets a body that has the complete conversation as its
input, and the router adds the id of the previous response or of the conversation to the replica's
response.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
from msgspec.structs import replace

from kvroute.contract.unreadable import DECODE_ERRORS
from kvroute.features.expanded import Expanded
from kvroute.features.responses import PREVIOUS_NOT_FOUND
from kvroute.features.responses.conversations import ConversationObjects
from kvroute.features.responses.items.input_items import input_items, with_input
from kvroute.features.responses.items.references import References
from kvroute.features.responses.response_items import PREVIOUS, as_input, listed_id
from kvroute.features.responses.stores.leased_values import INLINE_BYTES, TooLongError, owner
from kvroute.features.responses.stores.response_store import (
    MAX_LINKS,
    Responses,
    StoredTurn,
    joined,
)
from kvroute.features.responses.storing import Keep, Storing
from kvroute.router.api.call_limits import MAX_ITEMS, MAX_NAME, MAX_VALUES, values_in
from kvroute.router.api.calls import Call
from kvroute.router.api.errors import ApiError, invalid, needing_redis, shown, unsupported
from kvroute.router.api.json_members import Members, encode, members
from kvroute.router.placement.receipts import RECEIPTS
from kvroute.store.connection import REDIS_ERRORS, Outage

log = logging.getLogger("kvroute.conversations")

BACKGROUND = "background"  # the field with which a response runs although its client has left
CONVERSATION = "conversation"  # the field with a conversation's id, in bodies and responses
CONTINUING = (PREVIOUS, CONVERSATION)  # fields that continue something that is stored
OPTION = "--response-store-mb"  # the option that turns storing on
STORE_S = 1.0  # the most seconds that the end of a response waits until Redis has stored it


@dataclass(frozen=True, slots=True)
class Input:
    """Input items of the Responses API."""

    items: bytes | msgspec.Raw  # the items as a JSON array
    count: int = 0  # number of items
    values: int = 0  # number of JSON values in all items


NO_INPUT = Input(b"[]")
# Types of items that models write, besides messages.
WRITTEN = ("function_call", "custom_tool_call", "reasoning", "compaction")
MESSAGE_VALUES = 3  # JSON values of an input message: the object, its role and its content


def without_store(name: str, value: object, otherwise: str) -> ApiError:
    """Return the error for a field that this server cannot have, since it stores no responses."""
    return unsupported(
        name,
        f"{name} is {shown(value)}, but this server does not store responses; start it with "
        f"{OPTION}, or {otherwise}",
    )


class Conversations:
    """The stored conversations of one model, as one router reads and writes them."""

    def __init__(self, store: Responses, objects: ConversationObjects) -> None:
        """Read and write the responses in a store.

        In the methods, `salt` is the owner's: a response can be read only with the salt that it was
        stored with.

        Args:
            store: the responses in Redis. Its `max_bytes` is also the largest size of a body that
                contains the complete conversation.
            objects: the conversations that clients have created.
        """
        self.objects = objects
        self.responses = store
        self.references = References(objects.places, store, objects.store)
        self._outage = Outage(log, "responses are not stored")

    async def expand(self, call: Call) -> Expanded:
        """Return a call of the Responses API with the conversation that it continues.

        Raises:
            ApiError: the previous response or the conversation is unknown, or it is too long.
        """
        previous_id, conversation_id = _previous_id(call.body), _conversation_id(call.body)
        # `new` is the input that the stored response adds to the responses before it.
        own = new = await input_of(call)
        salt = owner(call.caller, call.body.get("cache_salt"))
        is_stored = call.body.get("store", True) in (True, None)
        keepers, continued = list[Keep](), Members()
        if call.body.get(BACKGROUND):  # replicas do not know that it runs in the background
            others = {k: v for k, v in members(call.raw).items() if k != BACKGROUND}
            call = replace(call, raw=encode(others))
            continued[BACKGROUND] = msgspec.Raw(b"true")
        if previous_id is not None:
            turns = await self._previous_turns(previous_id, salt)
            if (left := _without_known(call, lambda: _ids_in(turns, previous_id))) is not call:
                call, own = left, await input_of(left)
            new = own
            call = self._with_turns(call, own, turns)
            continued[PREVIOUS] = msgspec.Raw(encode(previous_id))
        elif conversation_id is not None:
            found = await self.objects.found(conversation_id, salt)
            before = found.conversation
            if (left := _without_known(call, lambda: before.ids)) is not call:
                call, own = left, await input_of(left)
            turn = StoredTurn(msgspec.Raw(found.items), 0, len(before.ids), before.values)
            call = self._with_turns(call, own, [turn])
            new = Input(
                members(call.raw)["input"], turn.count + own.count, turn.values + own.values
            )
            continued[CONVERSATION] = msgspec.Raw(encode({"id": conversation_id}))
            keepers.append(partial(self._keep, partial(self._append, own, conversation_id, salt)))
        if is_stored:
            keepers.append(partial(self._keep, partial(self._put, new, previous_id, salt)))
        storing = Storing(continued, keepers) if continued or keepers else None
        return Expanded(
            replace(call, is_stored=is_stored),
            has_more_messages=previous_id is not None or conversation_id is not None,
            finish=storing.finish if storing else None,
        )

    async def input_items(self, id: str, salt: str) -> list[dict[str, Any]] | None:  # noqa: A002
        """Return all input items of the conversation up to the response, the oldest first.

        The result is None if the response is not stored.

        Raises:
            ApiError: Redis cannot be used.
        """
        turns = await self._turns(id, salt)
        if not turns:
            return None
        *before, last = turns
        try:
            items = _decoded(joined([turn.items for turn in before]))
            return items + _decoded(last.items)[: last.inputs]
        except DECODE_ERRORS:  # another program wrote items that are not objects
            return None

    async def _previous_turns(self, previous_id: str, salt: str) -> list[StoredTurn]:
        if turns := await self._turns(previous_id, salt):
            return turns
        raise ApiError(
            400,
            f"Previous response with id {shown(previous_id)} not found: it or an earlier response "
            "of the conversation was not stored, has expired, was deleted or evicted, or has "
            "another cache_salt; send the complete conversation as input",
            param=PREVIOUS,
            code=PREVIOUS_NOT_FOUND,
        )

    async def _turns(self, id_: str, salt: str) -> list[StoredTurn]:
        try:
            with needing_redis():
                return await self.responses.conversation(id_, salt)
        except TooLongError:
            raise _too_long(id_) from None

    def _with_turns(self, call: Call, own: Input, turns: Sequence[StoredTurn]) -> Call:
        """Return the call with the complete conversation as its input.

        Args:
            own: the input that the client has sent with this call.
            turns: the earlier turns of the conversation.

        Raises:
            ApiError: the conversation is too long.
        """
        count = own.count + sum(turn.count for turn in turns)
        values = own.values + sum(turn.values for turn in turns)
        items = joined([*(turn.items for turn in turns), own.items])
        others = {k: v for k, v in members(call.raw).items() if k not in (*CONTINUING, "input")}
        raw = encode({**others, "input": msgspec.Raw(items)})
        if count > MAX_ITEMS["input"] or values > MAX_VALUES or len(raw) > self.responses.max_bytes:
            raise _too_long(call.body.get(PREVIOUS) or call.body.get(CONVERSATION))
        return replace(call, raw=raw)

    async def _keep(self, store: Callable[[Members], Awaitable[object]], response: Members) -> None:
        """Store a response or its items. Give up after STORE_S, or if Redis cannot be used."""
        try:
            async with asyncio.timeout(STORE_S):
                await store(response)
            self._outage.end()
            return
        except REDIS_ERRORS as error:
            self._outage.begin(error)
        except (*DECODE_ERRORS, LookupError) as error:
            log.warning("cannot store a response, because it cannot be decoded: %r", error)
        except ApiError as error:  # for example, a client has deleted the conversation
            log.debug("a response is not in its conversation: %s", error)
        self.responses.counts["failed"] += 1

    async def _put(self, own: Input, previous_id: str | None, salt: str, response: Members) -> None:
        """Store a response."""
        id_, turn = turn_of(response, own)
        body = encode({k: v for k, v in response.items() if k != RECEIPTS})
        if await self.responses.put(id_, salt, previous_id, turn, body) == "stored":
            items = _decoded(turn.items)
            added = items[_first_new(items, turn.inputs) :]
            await self.objects.places.put("response", id_, ids_of(added), salt)

    async def _append(self, own: Input, id_: str, salt: str, response: Members) -> None:
        """Add the input and the output of a response to its conversation."""
        output = as_input(_decoded(response["output"]))
        encoded = joined([own.items, encode(output)])
        await self.objects.append(id_, salt, [*_decoded(own.items), *output], encoded)


def _without_known(call: Call, known: Callable[[], Iterable[str]]) -> Call:
    """Return the call without the items of its input that are in the conversation already.

    Clients that keep the history themselves send such items again, with their ids.

    Args:
        known: returns the ids of the conversation's items.
    """
    given = call.body.get("input")
    if not (isinstance(given, list) and any(_id_of(item) for item in given)):
        return call
    items, ids = input_items(call), set(known())
    left = [item for item in items if _id_of(item.value) not in ids]
    return call if len(left) == len(items) else with_input(call, left)


def _id_of(item: Any) -> str | None:
    id_ = item.get("id") if isinstance(item, dict) else None
    return id_ if isinstance(id_, str) else None


def ids_of(items: Iterable[Any]) -> list[str]:
    """Return the ids of those items that have one."""
    return [id_ for item in items if (id_ := _id_of(item))]


def _ids_in(turns: Sequence[StoredTurn], last_id: str) -> list[str]:
    """Return the ids of the items of a conversation.

    Args:
        last_id: the id of its last response, whose list of items gives an id to each of them.
    """
    items = _decoded(joined([turn.items for turn in turns]))
    return [*ids_of(items), *(listed_id(last_id, number) for number in range(len(items)))]


def _first_new(items: Sequence[Mapping[str, Any]], inputs: int) -> int:
    """Return the index of the first item that is new with a response.

    A client that keeps the history sends all of it each time. New are the items after the last one
    that a model has written.

    Args:
        inputs: how many of the items are the response's input.
    """
    return next((n + 1 for n in reversed(range(inputs)) if _is_written(items[n])), 0)


def _is_written(item: Mapping[str, Any]) -> bool:
    """Return whether a model has written an item."""
    return item.get("role") == "assistant" or item.get("type") in WRITTEN


def _previous_id(body: Mapping[str, Any]) -> str | None:
    previous_id = body.get(PREVIOUS)
    if previous_id is None:
        return None
    if not isinstance(previous_id, str) or len(previous_id) > MAX_NAME:
        raise invalid(
            PREVIOUS,
            f"{PREVIOUS} is {shown(previous_id)}; expected the id of a response, a string of up to "
            f"{MAX_NAME} characters",
        )
    if body.get("previous_input_messages") is not None:
        raise invalid(
            PREVIOUS,
            f"{PREVIOUS} and previous_input_messages cannot be used together; "
            "send only one of them",
        )
    return previous_id


def _conversation_id(body: Mapping[str, Any]) -> str | None:
    given = body.get(CONVERSATION)
    if given is None:
        return None
    id_ = given.get("id") if isinstance(given, dict) else given
    if not isinstance(id_, str) or len(id_) > MAX_NAME:
        raise invalid(
            CONVERSATION,
            f"{CONVERSATION} is {shown(given)}; expected the id of a conversation, or an object "
            "with its id",
        )
    if body.get(PREVIOUS) is not None:
        raise invalid(
            CONVERSATION,
            f"{CONVERSATION} and {PREVIOUS} cannot be used together; send only one of them",
        )
    return id_


async def input_of(call: Call) -> Input:
    """Return the input that the client has sent with this call, without earlier turns.

    Raises:
        ApiError: the input has another type than a string or a list.
    """
    value = call.body.get("input")
    if value is None:
        return NO_INPUT
    if not isinstance(value, str | list):
        raise invalid("input", f"input is {shown(value)}; expected a string or a list of items")
    raw = members(call.raw)["input"]
    if isinstance(value, list):
        # Only the values of large bodies take so long to count that a thread is worth it.
        is_large = len(call.raw) > INLINE_BYTES
        count = await asyncio.to_thread(values_in, value) if is_large else values_in(value)
        return Input(raw, len(value), count)
    return Input(b"".join((b'[{"role":"user","content":', raw, b"}]")), 1, MESSAGE_VALUES)


def turn_of(response: Members, own: Input) -> tuple[str, StoredTurn]:
    """Return the response's id, and the turn that it adds to its conversation.

    Raises:
        DECODE_ERRORS, LookupError: the response cannot be decoded.
    """
    output = as_input(_decoded(response["output"]))
    turn = StoredTurn(
        items=msgspec.Raw(joined([own.items, encode(output)])),
        inputs=own.count,
        count=own.count + len(output),
        values=own.values + values_in(output),
    )
    return msgspec.json.decode(response["id"], type=str), turn


def _decoded(array: bytes | msgspec.Raw) -> list[dict[str, Any]]:
    return msgspec.json.decode(array, type=list[dict[str, Any]])


def _too_long(id_: object) -> ApiError:
    return ApiError(
        413,
        f"the conversation up to {shown(id_)} is too long: more than {MAX_LINKS} responses, "
        f"{MAX_ITEMS['input']} items, {MAX_VALUES} JSON values or --max-body-mb; start "
        "a new conversation with a shorter input",
        param=PREVIOUS,
        code="request_too_large",
    )
