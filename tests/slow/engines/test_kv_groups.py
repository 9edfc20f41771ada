"""vLLM's own accounts of a cache, driven without a model: what they tell, and of which tokens."""

import contextlib
from collections import Counter
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvroute.blocks.cache_groups import CacheGroup, Layout
from kvroute.blocks.fingerprint import Fingerprint, fingerprints, root
from kvroute.process.vllm_build import installed_version
from kvroute.replica.block_table import BlockTable, Changes
from kvroute.replica.engine.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from kvroute.router.index.boundaries import Boundaries, UnknownLayoutError
from tests.support.kv_shapes import SHAPES, cache_of

if TYPE_CHECKING:
    from tests.support.kv_managers import Cache

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own

UNIT = 16


def chain_of(
    token_ids: list[int], namespace: str = "", lora: str = "", unit: int = UNIT
) -> list[Fingerprint]:
    """As a router computes it."""
    parent = root(model="m", block_size=unit, namespace=namespace, variant=lora)
    return fingerprints(np.array(token_ids, np.uint32), block_size=unit, parent=parent)


def told(cache: "Cache", group: int = 0) -> list[Fingerprint]:
    """The fingerprints of the group's blocks since the last call."""
    events = cache.events()
    stored = [event for event in events if isinstance(event, BlockStored) and event.group == group]
    return [fingerprint for event in stored for fingerprint in event.fingerprints]


def tokens(count: int, start: int = 0) -> list[int]:
    return list(range(start, start + count))


class Listener:
    """Counts the blocks of which it hears, and knows the prompts of their hashes."""

    def __init__(self, cache: "Cache") -> None:
        self.cache = cache
        self.copies: list[Counter[object]] = [Counter() for _ in cache.held()]
        self.prints: dict[object, Fingerprint] = {}

    def learn(self, token_ids: list[int], namespace: str) -> None:
        from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

        chain = chain_of(token_ids, namespace)
        request = self.cache.request(token_ids, namespace)
        size = self.cache.pool.hash_block_size
        for number, hash_ in enumerate(request.block_hashes, start=1):
            self.prints[maybe_convert_block_hash(hash_)] = chain[number * size // UNIT - 1]

    def receive(self) -> None:
        for event in self.cache.events():
            match event:
                case BlockStored(hashes, found, group):
                    assert [self.prints[hash_] for hash_ in hashes] == found
                    self.copies[group].update(hashes)
                case BlockRemoved(hashes, group):
                    self.copies[group].subtract(hashes)
                case AllBlocksCleared():
                    self.copies = [Counter() for _ in self.copies]
        assert [+copy for copy in self.copies] == self.cache.held()


uses = st.tuples(
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 60)), min_size=1, max_size=4),
    st.integers(0, 40),  # tokens of the answer
    st.sampled_from(["", "tenant"]),
)


@pytest.mark.parametrize("shape", SHAPES)
@settings(max_examples=60, deadline=None)
@given(used=st.lists(uses, min_size=1, max_size=12), blocks=st.integers(12, 60))
def test_each_group_tells_what_it_has_by_the_fingerprints_of_its_blocks_ends(
    shape: str, used: list[Any], blocks: int
) -> None:
    cache = cache_of(shape, blocks=blocks)
    listener = Listener(cache)
    for parts, answered, namespace in used:
        prompt = [token for kind, count in parts for token in [kind] * count]
        answer = tokens(answered)
        listener.learn(prompt + answer, namespace)
        with contextlib.suppress(MemoryError):
            cache.run(prompt, answer, namespace=namespace)
        listener.receive()
    assert cache.pool.reset_prefix_cache()
    listener.receive()


@pytest.mark.parametrize("shape", ["plain", "one window", "states"])
def test_a_repeated_prompt_is_found(shape: str) -> None:
    cache = cache_of(shape)
    assert (cache.run(tokens(100)), cache.hit(tokens(100)), cache.run(tokens(100))) == (0, 96, 96)


def test_of_a_window_only_the_blocks_before_a_hits_end_are_told() -> None:
    cache = cache_of("narrow windows")
    cache.run(tokens(200))
    chain = chain_of(tokens(200))
    assert told(cache, group=1) == [chain[number] for number in (2, 3, 6, 7, 10, 11)]


def test_a_state_is_told_of_only_where_it_was_kept() -> None:
    cache = cache_of("states")
    cache.run(tokens(200))
    assert told(cache, group=1) == chain_of(tokens(200))[11:12]


def test_a_part_of_a_block_is_told_with_the_fingerprint_of_its_end() -> None:
    cache = cache_of("parts of states")
    cache.run(tokens(100))
    assert told(cache) == [chain_of(tokens(100))[number - 1] for number in (4, 6)]
    assert cache.hit(tokens(100)) == 96


def test_namespaces_and_adapters_are_in_the_fingerprints() -> None:
    cache = cache_of("plain")
    cache.run(tokens(64), namespace="tenant", lora="law")
    assert told(cache) == chain_of(tokens(64), "tenant", "law")


def image(identifier: str, offset: int, length: int) -> Any:
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

    return MultiModalFeatureSpec(None, "image", identifier, PlaceholderRange(offset, length))


def with_images(*images: tuple[str, int, int]) -> list[Fingerprint]:
    cache = cache_of("plain")
    cache.run([7] * 160, mm_features=[image(*each) for each in images])
    return told(cache)


def test_other_images_make_other_fingerprints_from_their_first_block_on() -> None:
    text = chain_of([7] * 160)
    cat, dog = with_images(("cat", 40, 30)), with_images(("dog", 40, 30))
    assert cat == with_images(("cat", 40, 30))
    assert cat[:2] == dog[:2] == text[:2]
    assert len({*cat[2:], *dog[2:], *text[2:]}) == 3 * 8


def test_an_image_elsewhere_makes_other_fingerprints() -> None:
    cat, later = with_images(("cat", 40, 30)), with_images(("cat", 41, 30))
    assert cat[:2] == later[:2]
    assert not {*cat[2:]} & {*later[2:]}


def test_a_second_image_changes_nothing_before_it() -> None:
    one = with_images(("cat", 20, 10), ("dog", 100, 4))
    other = with_images(("cat", 20, 10), ("cow", 100, 4))
    assert one[:6] == other[:6]
    assert not {*one[6:]} & {*other[6:]}


def test_images_make_the_same_fingerprints_however_a_prompt_is_cut_into_steps() -> None:
    images = [("cat", 40, 30), ("dog", 75, 2), ("cow", 76, 50)]
    cache = cache_of("plain", step_tokens=33)
    cache.run([7] * 160, mm_features=[image(*each) for each in images])
    assert told(cache) == with_images(*images)


def test_of_embeddings_nothing_is_told() -> None:
    import torch

    cache = cache_of("plain")
    cache.run([0] * 64, prompt_embeds=torch.zeros(64, 4))
    assert cache.events() == []
    assert sum(map(len, cache.held())) == 4


@pytest.mark.skipif(
    installed_version().startswith("0.31."), reason="vLLM 0.31 keeps the old tokens' hashes"
)
def test_a_session_whose_tokens_were_replaced_tells_of_the_new_ones() -> None:
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import StreamingUpdate

    cache = cache_of("plain")
    request = cache.request(tokens(100))
    cache.run(request)
    told(cache)
    request.num_computed_tokens = 20
    update = StreamingUpdate(None, tokens(80, start=500), 4, 0.0, request.sampling_params)
    scheduler: Any = SimpleNamespace(hash_block_size=16, log_stats=False)
    Scheduler._update_request_as_session(scheduler, request, update)
    request.num_computed_tokens = 0
    cache.run(request)
    assert told(cache) == chain_of(tokens(20) + tokens(80, start=500))[1:]


def test_what_a_request_finds_is_not_told_again() -> None:
    cache = cache_of("plain")
    cache.run(tokens(64))
    told(cache)
    request = cache.request(tokens(64))
    request.kv_cache_report_mode = "full"
    cache.run(request)
    assert told(cache) == chain_of(tokens(64))[3:]


def test_blocks_that_end_between_two_fingerprints_are_left_out() -> None:
    cache = cache_of("plain", unit=32)
    cache.run(tokens(100))
    assert told(cache) == chain_of(tokens(100), unit=32)


@pytest.mark.parametrize("medium", [None, "GPU", "CPU", "cpu", "STORAGE"])
@pytest.mark.parametrize("token_ids", [[], [*range(16)]], ids=["without ids", "with ids"])
def test_what_connectors_tell_of_their_memory_is_never_a_hit(
    medium: str | None, token_ids: list[int]
) -> None:
    from vllm.distributed import kv_events

    from kvroute.replica.vllm_engine.blocks.events import EventBatch, Stored, event_of

    foreign = [
        kv_events.BlockStored([b"a", b"b"], None, token_ids, 16, None, medium, None),
        kv_events.BlockRemoved([b"a", b"mine"], medium),
    ]
    table, changes = BlockTable(), Changes()
    for batch in (
        EventBatch(ts=0.0, events=[Stored([b"mine"], [Fingerprint(7)], 0)]),
        kv_events.KVEventBatch(ts=0.0, events=foreign),  # as vLLM publishes a connector's
    ):
        packed = msgspec.msgpack.encode(batch)
        events = map(event_of, msgspec.msgpack.decode(packed, type=EventBatch).events)
        table.apply([event for event in events if event is not None], changes)
    assert set(table.held()) == set(changes.added) == {7}
    assert not changes.removed


FULL = CacheGroup("full_attention", 16)
WINDOW = CacheGroup("sliding_window", 16, 40)


def test_a_layout_has_full_attention_first_and_equal_groups_once() -> None:
    assert cache_of("plain").division.layout is None
    windows = cache_of("windows").division
    assert windows.layout == Layout((FULL, WINDOW), hit_tokens=16)
    assert windows.group_entries == (1, 0, 1)
    states = cache_of("states").division
    both = CacheGroup("full_attention", 32), CacheGroup("mamba", 32)
    assert states.layout == Layout(both, hit_tokens=32)
    assert states.group_entries == (0, 1, 1)
    assert cache_of("one window").division.layout == Layout((WINDOW,), hit_tokens=16)
    parts = cache_of("parts of states").division.layout
    assert parts is not None
    assert parts.hit_tokens == 16
    assert cache_of("wide windows").division.layout == Layout(
        (FULL, CacheGroup("sliding_window", 32, 70)), hit_tokens=32
    )


def test_blocks_that_end_between_fingerprints_make_a_layout_that_no_router_knows() -> None:
    division = cache_of("plain", unit=32).division
    assert not division.is_plain
    assert division.layout == Layout((FULL,), hit_tokens=16)
    with pytest.raises(UnknownLayoutError, match="blocks of 16 tokens"):
        Boundaries(division.layout, division.unit)


@pytest.mark.parametrize(
    ("shape", "blocks"),
    [("plain", 100), ("windows", 33), ("wide windows", 66), ("states", 66), ("pieces", 100)],
)
def test_what_fits_is_counted_in_fingerprints(shape: str, blocks: int) -> None:
    assert cache_of(shape).division.capacity_blocks(100) == blocks


def test_a_group_without_prefix_caching_takes_no_part() -> None:
    from kvroute.replica.vllm_engine.blocks.division import Division

    division = Division(16, 16, (None, FULL))
    assert division.group_entries == (None, 0)
    assert not division.is_plain
    assert division.layout == Layout((FULL,), hit_tokens=16)
    assert Division(16, 16, ()).layout is None


def test_layers_whose_windows_differ_are_unknown_and_those_of_full_attention_have_none() -> None:
    from vllm.v1.kv_cache_interface import FullAttentionSpec, UniformTypeKVCacheSpecs

    from kvroute.replica.vllm_engine.blocks.division import _group
    from tests.support.kv_managers import HEADS, window

    specs = {"a": window(16, 40), "b": window(16, 80)}
    assert _group(UniformTypeKVCacheSpecs(16, specs), 16) == CacheGroup("unknown", 16)
    same = {"a": window(16, 40), "b": window(16, 40)}
    assert _group(UniformTypeKVCacheSpecs(16, same), 16) == WINDOW
    assert _group(FullAttentionSpec(16, sliding_window=40, **HEADS), 16) == FULL
