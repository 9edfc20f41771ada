"""A server's KV cache events are read, whatever version of vLLM has published them."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest

from kvroute.replica.attached_engine.server_cache.wire import (
    MAX_KINDS,
    ClearedEvent,
    RemovedEvent,
    StoredEvent,
    decode_batch,
)

Fields = Mapping[str, Any]

STORED: Fields = {
    "type": "BlockStored",
    "block_hashes": [b"a", 7],
    "parent_block_hash": None,
    "token_ids": [1, 2, 3, 4],
    "block_size": 2,
}
REMOVED: Fields = {"type": "BlockRemoved", "block_hashes": [b"a"]}
CLEARED: Fields = {"type": "AllBlocksCleared"}
# The fields that vLLM 0.26 to 0.33 add, with a value that each can have.
LATER: Fields = {
    "lora_id": 3,
    "medium": "GPU",
    "lora_name": "sql",
    "extra_keys": [["sql", ["image", -3], "salt"], None],
    "group_idx": 1,
    "kv_cache_spec_kind": "sliding_window",
    "kv_cache_spec_sliding_window": 128,
    "locality": "LOCAL",
    "ownership": "disk",
    "session_id": "s",
    "lookahead_token_ids": [5, 6],
    "metadata_only": True,
    "a_field_of_tomorrow": {"x": [1]},
}
UNKNOWN: Fields = {"type": "BlockMoved", "block_hashes": [b"a"], "to": "CPU"}


def payload(*events: Any, more: tuple[Any, ...] = (0,)) -> bytes:
    """Return a batch. The rank, and what later versions add, follow the events."""
    return msgspec.msgpack.encode([1.5, [*events], *more])


@pytest.mark.parametrize("more", [(), (None,), (1,), (1, "new")])
@pytest.mark.parametrize("count", range(len(LATER) + 1))
def test_events_with_later_fields_are_read(count: int, more: tuple[Any, ...]) -> None:
    later = dict(list(LATER.items())[:count])
    batch = decode_batch(
        payload({**STORED, **later}, {**REMOVED, **later}, CLEARED, more=more), Counter()
    )
    stored, removed, cleared = batch.events
    assert isinstance(stored, StoredEvent)
    assert (stored.block_hashes, stored.token_ids) == ([b"a", 7], [1, 2, 3, 4])
    assert (stored.medium, stored.lora_name) == (later.get("medium"), later.get("lora_name"))
    assert stored.extra_keys == later.get("extra_keys")
    assert isinstance(removed, RemovedEvent)
    assert (removed.medium, removed.group_idx) == (later.get("medium"), later.get("group_idx"))
    assert cleared == ClearedEvent()


def test_events_of_unknown_kinds_are_skipped_and_counted() -> None:
    skipped = Counter[str]()
    batch = decode_batch(payload(UNKNOWN, STORED, UNKNOWN, CLEARED), skipped)
    assert [type(event) for event in batch.events] == [StoredEvent, ClearedEvent]
    assert (batch.ts, skipped) == (1.5, Counter({"BlockMoved": 2}))
    assert not decode_batch(payload(UNKNOWN), skipped).events
    assert skipped == Counter({"BlockMoved": 3})


def test_the_kinds_that_are_counted_are_bounded() -> None:
    skipped = Counter[str]()
    decode_batch(payload(*({"type": f"{number}{'x' * 9999}"} for number in range(99))), skipped)
    assert sum(skipped.values()) == 99
    assert len(skipped) == MAX_KINDS + 1
    assert sum(map(len, skipped)) < 10_000


@pytest.mark.parametrize(
    "event",
    [
        {**STORED, "token_ids": "many"},
        {**STORED, "block_size": None},
        {**REMOVED, "block_hashes": [1.5]},
        {"type": "BlockRemoved"},
        {"type": 7},
        {"block_hashes": []},
        ["BlockStored", [b"a"]],
        None,
    ],
)
def test_a_known_event_that_cannot_be_read_is_an_error(event: Any) -> None:
    for events in ((event,), (UNKNOWN, event)):
        with pytest.raises(msgspec.MsgspecError):
            decode_batch(payload(*events), Counter())


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x93\x01", msgspec.msgpack.encode({"ts": 1})])
def test_what_is_no_batch_is_an_error(data: bytes) -> None:
    with pytest.raises(msgspec.MsgspecError):
        decode_batch(data, Counter())
