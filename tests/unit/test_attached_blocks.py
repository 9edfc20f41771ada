"""A stock server's KV cache events become the fingerprints that routers compute."""

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kvroute.blocks.cache_groups import CacheGroup, Layout, group_fingerprint
from kvroute.blocks.chain import EVERYBODY, Scope, Space
from kvroute.blocks.fingerprint import Fingerprint, MediaSpan
from kvroute.replica.attached_engine.server_cache.cached_blocks import ServerBlocks
from kvroute.replica.attached_engine.server_cache.sent_blocks import SentBlocks
from kvroute.replica.attached_engine.server_cache.wire import (
    Batch,
    ClearedEvent,
    RemovedEvent,
    StoredEvent,
)
from kvroute.replica.block_table import BlockTable, Changes

SIZE = 4  # tokens in a block
SPACE = Space("model", "", SIZE)
PROMPT = list(range(100, 100 + 3 * SIZE))


def stored(
    prompt: Sequence[int],
    *,
    first: int = 0,
    salt: str = "",
    lora: str | None = None,
    images: Sequence[MediaSpan] = (),
    **more: Any,
) -> StoredEvent:
    """The event for a prompt's full blocks from number `first` on, as vLLM publishes it."""
    blocks = len(prompt) // SIZE
    hashes: list[int | bytes] = [
        repr((prompt[: (n + 1) * SIZE], salt, lora)).encode() for n in range(blocks)
    ]
    keys = []
    for number in range(first, blocks):
        begin, end = number * SIZE, (number + 1) * SIZE
        key: list[object] = [lora] if lora else []
        for image in images:
            if image.offset < end and begin < image.end:
                key.append([image.identifier, image.offset - begin])
        if salt and number == 0:
            key.append(salt)
        keys.append(key or None)
    return StoredEvent(
        hashes[first:],
        hashes[first - 1] if first else None,
        [*prompt[first * SIZE : blocks * SIZE]],
        SIZE,
        lora_name=lora,
        extra_keys=keys if any(keys) else None,
        **more,
    )


def chain(
    prompt: Sequence[int], scope: Scope = EVERYBODY, images: Sequence[MediaSpan] = ()
) -> list[int]:
    ids = np.array(prompt[: len(prompt) // SIZE * SIZE], np.uint32)
    return [int(each) for each in SPACE.chain(ids, scope, images)]


def held(blocks: ServerBlocks, *events: StoredEvent | RemovedEvent | ClearedEvent) -> set[int]:
    """The fingerprints that a replica publishes after these events."""
    table = BlockTable()
    for event in events:
        table.apply(blocks.apply(Batch(0.0, [event])), Changes())
    return {int(each) for each in table.held()}


@pytest.mark.parametrize("salt", ["", "tenant"])
@pytest.mark.parametrize("lora", [None, "sql"])
def test_a_prompts_blocks_have_the_routers_fingerprints(salt: str, lora: str | None) -> None:
    expected = chain(PROMPT, Scope(lora or "", salt))
    assert held(ServerBlocks(SPACE), stored(PROMPT, salt=salt, lora=lora)) == {*expected}


@given(cut=st.integers(1, 2), salt=st.sampled_from(["", "a", "sql"]), seed=st.integers(0, 99))
def test_blocks_in_several_events_have_the_same_fingerprints(
    cut: int, salt: str, seed: int
) -> None:
    prompt = random.Random(seed).choices(range(1000), k=3 * SIZE)
    events = stored(prompt[: cut * SIZE], salt=salt), stored(prompt, first=cut, salt=salt)
    assert held(ServerBlocks(SPACE), *events) == {*chain(prompt, Scope("", salt))}


def test_images_are_part_of_the_fingerprints() -> None:
    image = MediaSpan("digest", 2, SIZE)  # it reaches into the second block
    expected = chain(PROMPT, images=[image])
    assert held(ServerBlocks(SPACE), stored(PROMPT, images=[image])) == {*expected}


def test_a_block_stays_until_its_last_copy_is_evicted() -> None:
    blocks, event = ServerBlocks(SPACE), stored(PROMPT)
    evicted = RemovedEvent(event.block_hashes)
    assert held(blocks, event, event, evicted) == {*chain(PROMPT)}
    assert blocks.hit_blocks([Fingerprint(each) for each in chain(PROMPT)]) == 3
    assert held(blocks, evicted) == set()
    assert blocks.hit_blocks([Fingerprint(each) for each in chain(PROMPT)]) == 0


def test_a_reported_hit_is_no_further_copy() -> None:
    blocks, event = ServerBlocks(SPACE), stored(PROMPT)
    blocks.reports_hits = True
    assert held(blocks, event, event, RemovedEvent(event.block_hashes)) == set()


def test_blocks_behind_an_unknown_parent_are_left_out_and_counted() -> None:
    blocks = ServerBlocks(SPACE)
    assert held(blocks, stored(PROMPT, first=1)) == set()
    assert blocks.skipped == Counter({"unknown parent": 2})


@pytest.mark.parametrize(
    "change",
    [
        {"medium": "STORAGE"},
        {"medium": "cpu"},
        {"medium": "CPU", "locality": "REMOTE"},
        {"group_idx": 16},
        {"group_idx": -1},
        {"metadata_only": True},
    ],
)
def test_blocks_elsewhere_are_left_out_and_counted(change: dict[str, Any]) -> None:
    blocks = ServerBlocks(SPACE)
    assert held(blocks, stored(PROMPT, **change)) == set()
    assert blocks.skipped == Counter({"other memory": 3})


WINDOW: Mapping[str, Any] = {
    "group_idx": 1,
    "kv_cache_spec_kind": "sliding_window",
    "kv_cache_spec_sliding_window": SIZE + 1,
}


def sparse(event: StoredEvent, *numbers: int) -> StoredEvent:
    """The event without the blocks that the server does not keep; the tokens stay complete."""
    return replace(event, block_hashes=[event.block_hashes[number] for number in numbers])


def published(blocks: ServerBlocks, *events: StoredEvent | RemovedEvent | ClearedEvent) -> set[int]:
    """The fingerprints of all groups after these events, in the layout that they teach."""
    blocks.apply(Batch(0.0, [*events]))
    table = BlockTable(blocks.groups.group_entries)
    table.apply(blocks.stored(), Changes())
    return {int(each) for each in table.held()}


@pytest.mark.parametrize("window_first", [False, True])
def test_each_group_of_a_hybrid_model_has_its_own_blocks(window_first: bool) -> None:
    full, last = stored(PROMPT), sparse(stored(PROMPT, **WINDOW), 2)
    events = (last, full) if window_first else (full, last)
    blocks = ServerBlocks(SPACE)
    expected = {*chain(PROMPT), group_fingerprint(Fingerprint(chain(PROMPT)[2]), 1)}
    assert published(blocks, *events) == expected
    window = CacheGroup("sliding_window", SIZE, SIZE + 1)
    assert blocks.groups.layout == Layout((CacheGroup("full_attention", SIZE), window), SIZE)
    evicted = RemovedEvent(last.block_hashes, group_idx=1)
    assert published(blocks, evicted) == {*chain(PROMPT)}


def test_groups_of_one_kind_publish_the_blocks_that_all_of_them_have() -> None:
    first, second = stored(PROMPT, **WINDOW), stored(PROMPT, **{**WINDOW, "group_idx": 2})
    blocks = ServerBlocks(SPACE)
    published(blocks, stored(PROMPT), first, sparse(second, 1, 2))
    assert blocks.groups.group_entries == (0, 1, 1)
    expected = {int(group_fingerprint(Fingerprint(each), 1)) for each in chain(PROMPT)[1:]}
    assert published(blocks) == {*chain(PROMPT), *expected}


def test_full_attention_is_the_first_entry_whatever_its_number_at_the_server() -> None:
    full = stored(PROMPT, group_idx=1, kv_cache_spec_kind="mla_attention")
    blocks = ServerBlocks(SPACE)
    expected = {*chain(PROMPT), group_fingerprint(Fingerprint(chain(PROMPT)[2]), 1)}
    assert (
        published(blocks, sparse(stored(PROMPT, **{**WINDOW, "group_idx": 0}), 2), full) == expected
    )
    assert blocks.hit_blocks([Fingerprint(each) for each in chain(PROMPT)]) == 3


def test_blocks_of_several_units_are_published_by_their_ends() -> None:
    prompt = PROMPT + PROMPT[:SIZE]
    large = stored(prompt)
    large = replace(large, block_hashes=large.block_hashes[1::2], block_size=2 * SIZE)
    blocks = ServerBlocks(SPACE)
    ends = chain(prompt)[1::2]
    states = {int(group_fingerprint(Fingerprint(each), 1)) for each in ends[1:]}
    event = replace(sparse(large, 1), group_idx=1, kv_cache_spec_kind="mamba")
    assert published(blocks, large, event) == {*ends, *states}
    assert blocks.groups.layout is not None
    assert blocks.groups.layout.hit_tokens == 2 * SIZE


@pytest.mark.parametrize("kind", ["chunked_local_attention", "of tomorrow", "unknown"])
def test_a_kind_with_unknown_needs_counts_as_full_attention(kind: str) -> None:
    blocks = ServerBlocks(SPACE)
    other = stored(PROMPT, group_idx=1, kv_cache_spec_kind=kind)
    assert published(blocks, stored(PROMPT), sparse(other, 0, 2)) == {
        fingerprint for number, fingerprint in enumerate(chain(PROMPT)) if number != 1
    }
    assert blocks.groups.layout is None


def test_a_reported_hit_of_a_window_means_the_window_only() -> None:
    blocks = ServerBlocks(SPACE)
    published(blocks, stored(PROMPT), sparse(stored(PROMPT, **WINDOW), 2))
    blocks.clear()
    blocks.reports_hits = True
    expected = {*chain(PROMPT), group_fingerprint(Fingerprint(chain(PROMPT)[2]), 1)}
    assert published(blocks, stored(PROMPT), stored(PROMPT, **WINDOW)) == expected


@pytest.mark.parametrize("size", [0, -1, 2**60, SIZE + 1])
def test_a_block_size_that_cannot_be_right_is_left_out(size: int) -> None:
    blocks = ServerBlocks(SPACE)
    assert published(blocks, replace(stored(PROMPT), block_size=size)) == set()


def test_keys_of_unknown_meaning_are_left_out_and_counted() -> None:
    event = stored(PROMPT)
    event.extra_keys = [[17], None, None]
    blocks = ServerBlocks(SPACE)
    assert held(blocks, event) == set()
    assert blocks.skipped == Counter({"unknown keys": 3})


def test_a_cleared_cache_holds_nothing() -> None:
    assert held(ServerBlocks(SPACE), stored(PROMPT), ClearedEvent()) == set()


@given(seed=st.integers(0, 999))
def test_the_table_holds_what_a_cache_with_copies_and_evictions_holds(seed: int) -> None:
    rng, blocks, table = random.Random(seed), ServerBlocks(SPACE), BlockTable()
    cache = Counter[bytes]()  # number of copies of each block
    fingerprints: dict[bytes, int] = {}
    for _ in range(30):
        prompt = rng.choices((1, 2), k=SIZE) + rng.choices((1, 2), k=SIZE)
        event = stored(prompt)
        if rng.random() < 0.6:
            cache.update(event.block_hashes)  # type: ignore[arg-type]
            for hash_, fingerprint in zip(event.block_hashes, chain(prompt), strict=True):
                fingerprints[hash_] = fingerprint  # type: ignore[index]
            batch = Batch(0.0, [event])
        elif known := [*cache.elements()]:
            evicted = rng.choice(known)
            cache -= Counter({evicted: 1})
            batch = Batch(0.0, [RemovedEvent([evicted])])
        else:
            continue
        table.apply(blocks.apply(batch), Changes())
        assert {int(each) for each in table.held()} == {fingerprints[each] for each in cache}
        assert blocks.held == [dict.fromkeys(cache, 1)]


def test_without_events_the_latest_prompts_are_assumed_to_be_cached() -> None:
    blocks, table = SentBlocks(capacity_blocks=3), BlockTable()
    first, second = chain(PROMPT), chain([*PROMPT[:SIZE], *range(2 * SIZE)])
    for prompt in (first, second):
        table.apply(blocks.sent([Fingerprint(each) for each in prompt]), Changes())
    held_now = {int(each) for each in table.held()}
    assert held_now == {*second}, "the blocks of the first prompt were evicted, the oldest first"
    assert blocks.hit_blocks([Fingerprint(each) for each in first]) == 1
