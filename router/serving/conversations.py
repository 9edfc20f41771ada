"""Conversations of the Responses API whose state is in Redis: any router can continue any of them.

Replicas do not know that conversations are stored. A replica gets a body with the whole
conversation as its input, and the router adds the id of the previous response to the replica's
response.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace
from redis.exceptions import RedisError

from kvroute.contract.unreadable import DECODE_ERRORS
from kvroute.router.api.call_limits import MAX_ITEMS, MAX_NAME, MAX_VALUES, values_in
from kvroute.router.api.calls import RESPONSES, Call
from kvroute.router.api.errors import ApiError, invalid, needing_redis, shown, unsupported
from kvroute.router.api.response_object import PREVIOUS, Members, as_input, encode, members
from kvroute.router.placement.receipts import RECEIPTS
from kvroute.store.named_prefix import Prefix
from kvroute.store.outage import Outage
from kvroute.store.responses import MAX_LINKS, Responses, StoredTurn, TooLongError, joined

log = logging.getLogger("kvroute.conversations")

OPTION = "--response-store-mb"
STORED_S = 1.0  # most seconds that the end of a response is held back until Redis has stored it


@dataclass(frozen=True, slots=True)
class Input:
    """Input items of the Responses API."""

    items: bytes | msgspec.Raw  # JSON array
    count: int = 0
    values: int = 0  # JSON values in them


NO_INPUT = Input(b"[]")


class Expanded(Struct, frozen=True):
    """A call, with its conversation and the named prefix of its prompts."""

    call: Call  # the call with the whole conversation
    previous_id: str | None = None  # the response that it continues; None: a new conversation
    store: Callable[[Members], Awaitable[None]] | None = None  # stores its response; None: do not
    prefix: Prefix | None = None  # the named prefix before its prompts


async def continued(call: Call, conversations: "Conversations | None") -> Expanded:
    """Return the call with the conversation before it.

    Args:
        conversations: the stored conversations; None: this server stores none.

    Raises:
        ApiError: there is no such conversation, or the whole is too long.
    """
    if call.path != RESPONSES:
        return Expanded(call)
    if conversations is not None:
        return await conversations.continued(call)
    if (previous_id := call.body.get(PREVIOUS)) is None:
        return Expanded(call)
    raise unsupported(
        PREVIOUS,
        f"{PREVIOUS} is {shown(previous_id)}, and this server stores no responses; start it with "
        f"{OPTION}, or send the whole conversation as input",
    )


class Conversations:
    """The stored conversations of one model, as one router reads and writes them."""

    def __init__(self, store: Responses, *, max_bytes: int) -> None:
        """Create the service.

        Args:
            store: the responses in Redis.
            max_bytes: most bytes of a body together with its conversation.
        """
        self._store = store
        self._most_bytes = max_bytes
        self._outage = Outage(log, "responses are not stored")

    async def continued(self, call: Call) -> Expanded:
        """Return a call of the Responses API with the conversation before it."""
        previous_id, own, salt = _previous_id(call.body), _input(call), call.owner
        is_stored = call.body.get("store", True) in (True, None)
        if previous_id is not None:
            call = self._continued(call, own, await self._before(previous_id, salt))
        store = partial(self._put, own, previous_id, salt) if is_stored else None
        return Expanded(replace(call, is_stored=is_stored), previous_id, store)

    async def get(self, id: str, salt: str) -> bytes | None:  # noqa: A002
        """Return the response as its client received it; None: it is not stored here.

        Raises:
            ApiError: Redis cannot be read.
        """
        with needing_redis():
            return await self._store.get(id, salt)

    async def delete(self, id: str, salt: str) -> bool:  # noqa: A002
        """Delete a response, and return whether it was stored here.

        Raises:
            ApiError: Redis cannot be used.
        """
        with needing_redis():
            return await self._store.delete(id, salt)

    async def input_items(self, id: str, salt: str) -> list[dict[str, Any]] | None:  # noqa: A002
        """Return all input items that led to the response, the oldest first.

        None: the response is not stored here.

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

    async def _before(self, previous_id: str, salt: str) -> list[StoredTurn]:
        if turns := await self._turns(previous_id, salt):
            return turns
        raise ApiError(
            400,
            f"Previous response with id {shown(previous_id)} not found: it, or one before it, was "
            "not stored, has expired, was deleted or made room for others, or has another "
            "cache_salt; send the whole conversation as input",
            param=PREVIOUS,
            code="previous_response_not_found",
        )

    async def _turns(self, id_: str, salt: str) -> list[StoredTurn]:
        try:
            with needing_redis():
                return await self._store.conversation(id_, salt)
        except TooLongError:
            raise _too_long(id_) from None

    def _continued(self, call: Call, own: Input, turns: Sequence[StoredTurn]) -> Call:
        """Return the call with the whole conversation as its input.

        Raises:
            ApiError: the conversation is too long.
        """
        count = own.count + sum(turn.count for turn in turns)
        values = own.values + sum(turn.values for turn in turns)
        items = joined([*(turn.items for turn in turns), own.items])
        others = {k: v for k, v in members(call.raw).items() if k not in (PREVIOUS, "input")}
        raw = encode({**others, "input": msgspec.Raw(items)})
        if count > MAX_ITEMS["input"] or values > MAX_VALUES or len(raw) > self._most_bytes:
            raise _too_long(call.body[PREVIOUS])
        return replace(call, raw=raw)

    async def _put(self, own: Input, previous_id: str | None, salt: str, response: Members) -> None:
        """Store a response. Return after STORED_S at the latest, even if it is not stored."""
        try:
            id_, turn = _turn(response, own)
            body = encode({k: v for k, v in response.items() if k != RECEIPTS})
            async with asyncio.timeout(STORED_S):
                await self._store.put(id_, salt, previous_id, turn, body)
            self._outage.end()
        except (RedisError, OSError) as error:
            self._store.counts["failed"] += 1
            self._outage.begin(error)
        except (*DECODE_ERRORS, LookupError) as error:
            self._store.counts["failed"] += 1
            log.warning("a response cannot be stored: %r", error)


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
        raise invalid(PREVIOUS, f"{PREVIOUS} and previous_input_messages are given; keep one")
    return previous_id


def _input(call: Call) -> Input:
    """Return the call's own input.

    Raises:
        ApiError: it cannot be read.
    """
    given = call.body.get("input")
    if given is None:
        return NO_INPUT
    if not isinstance(given, str | list):
        raise invalid("input", f"input is {shown(given)}; expected a string or a list of items")
    raw = members(call.raw)["input"]
    if isinstance(given, list):
        return Input(raw, len(given), call.input_values)
    return Input(b"".join((b'[{"role":"user","content":', raw, b"}]")), 1, 3)


def _turn(response: Members, own: Input) -> tuple[str, StoredTurn]:
    """Return the response's id, and what it adds to its conversation.

    Raises:
        DECODE_ERRORS, LookupError: the response cannot be read.
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


def _too_long(id_: str) -> ApiError:
    return ApiError(
        413,
        f"the conversation up to {shown(id_)} is too long: more than {MAX_LINKS} responses, "
        f"{MAX_ITEMS['input']} items, {MAX_VALUES} JSON values or KVROUTE_MAX_BODY_MB; begin a "
        "new one, with less as input",
        param=PREVIOUS,
        code="request_too_large",
    )
