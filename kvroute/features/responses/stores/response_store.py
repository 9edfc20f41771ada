"""Stored responses of the Responses API. Each response has a link to the response before it.

They are leased values (leased_values.py), under keys with the same hash tag as the index
(index.py): kvroute:{TAG}:responses. The first part of a value is the KEY of the previous response
and then a StoredTurn, which has what the response adds to its conversation. The second part is the
response. Both are JSON, compressed with zlib. To read a conversation, only the first parts are
read: the responses are larger, since each one repeats the conversation's tools.
"""

import re
from collections import Counter
from collections.abc import Sequence
from typing import Literal, get_args

import msgspec

from kvroute.contract.records import VERSION, Count, Versioned, check_version, encode
from kvroute.contract.unreadable import DECODE_ERRORS, UnreadableError
from kvroute.features.responses import RESPONSE
from kvroute.features.responses.stores.leased_scripts import READ
from kvroute.features.responses.stores.leased_values import (
    FIRST,
    KEY_BYTES,
    SECOND,
    LeasedStore,
    TooLongError,
    decompressed,
    key,
    packed,
    unpacked,
)
from kvroute.store.connection import with_timeout

ROOT = bytes(KEY_BYTES)  # stands for the previous KEY in a conversation's first response
MAX_LINKS = 1000  # maximum number of responses in one conversation
LARGEST_RESPONSE = 4  # limit of a response's JSON, in multiples of max_bytes; it may have logprobs

# known: a response with this id is already stored. failed: Redis failed; the caller counts these.
Outcome = Literal["stored", "too_large", "known", "failed"]

EMPTY = re.compile(rb"\[\s*\]")


class StoredTurn(msgspec.Struct, frozen=True):
    """The items that one response adds to its conversation: its input and its output."""

    items: msgspec.Raw  # JSON array: the response's input, then its output as input of the next one
    inputs: Count  # how many of the items are the response's input
    count: Count  # number of items
    values: Count  # number of JSON values in the items
    version: int = VERSION


_turns = msgspec.json.Decoder(StoredTurn)
_objects = msgspec.json.Decoder(dict[str, msgspec.Raw])
_versions = msgspec.json.Decoder(Versioned)


class Responses(LeasedStore):
    """The stored responses of one model of one cluster."""

    NAME = "responses"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.counts = Counter[str](dict.fromkeys(get_args(Outcome), 0))
        self._read = self.client.register_script(READ)

    @with_timeout
    async def put(
        self,
        id: str,  # noqa: A002
        salt: str,
        previous_id: str | None,
        turn: StoredTurn,
        response: bytes,
    ) -> Outcome:
        """Store a response and count the outcome.

        The least recently used responses are removed until the new one fits. If a response is
        already stored under the id, that one is kept, and the new one is not stored.

        Args:
            previous_id: id of the previous response; None: this one is the first.
            turn: the items that the response adds to the conversation.
            response: JSON of the response, as the client gets it.
        """
        previous_key = ROOT if previous_id is None else key(previous_id, salt)
        first = previous_key + await packed(encode(turn))
        outcome = await self.put_value(key(id, salt), first, await packed(response))
        self.counts[outcome] += 1
        return outcome

    @with_timeout
    async def conversation(self, id: str, salt: str) -> list[StoredTurn]:  # noqa: A002
        """Return the turns of a conversation up to this response, oldest first.

        The list is empty if a turn is missing, expired or unreadable. The lease of all these
        responses is extended to `ttl_s` from now. Raises TooLongError.
        """
        values = await self.run(self._read, key(id, salt), MAX_LINKS, self.max_bytes)
        if values == b"long":
            raise TooLongError
        try:
            return (await unpacked(_unpack_turns, values, self.max_bytes))[::-1]
        except DECODE_ERRORS as error:
            self.unreadable.add(RESPONSE, id, error)
            return []

    @with_timeout
    async def turn(self, id: str, salt: str) -> StoredTurn | None:  # noqa: A002
        """Return the turn of one response; None if it is missing, expired or unreadable.

        Its lease is extended.
        """
        if not (value := await self.part(key(id, salt), FIRST)):
            return None
        try:
            return (await unpacked(_unpack_turns, [value], self.max_bytes))[0]
        except (*DECODE_ERRORS, TooLongError) as error:
            self.unreadable.add(RESPONSE, id, error)
            return None

    @with_timeout
    async def get(self, id: str, salt: str) -> bytes | None:  # noqa: A002
        """Return the JSON of a response; None if it is missing, expired or unreadable.

        Its lease is extended to `ttl_s` from now.
        """
        if not (packed_response := await self.part(key(id, salt), SECOND)):
            return None
        try:
            return await unpacked(_unpack_response, [packed_response], self.max_bytes)
        except (*DECODE_ERRORS, TooLongError) as error:
            self.unreadable.add(RESPONSE, id, error)
            return None

    @with_timeout
    async def delete(self, id: str, salt: str) -> bool:  # noqa: A002
        """Delete a response; return whether there was one."""
        return await self.delete_value(key(id, salt))


def _unpack_turns(values: Sequence[bytes], max_bytes: int) -> list[StoredTurn]:
    turns, left = [], max_bytes
    for value in values:
        data = decompressed(value[KEY_BYTES:], left)
        left -= len(data)
        check_version(_versions, data)
        turn = _turns.decode(data)
        if bytes(memoryview(turn.items)[:1]) != b"[":
            raise UnreadableError("its items are not a JSON array")
        turns.append(turn)
    return turns


def _unpack_response(parts: Sequence[bytes], max_bytes: int) -> bytes:
    data = decompressed(parts[0], LARGEST_RESPONSE * max_bytes)
    _objects.decode(data)
    return data


def joined(arrays: Sequence[bytes | msgspec.Raw]) -> bytes:
    """Join JSON arrays into one array, without a copy of each array."""
    insides = [
        memoryview(array)[1:-1] for array in arrays if not EMPTY.fullmatch(memoryview(array))
    ]
    return b"".join((b"[", b",".join(insides), b"]"))
