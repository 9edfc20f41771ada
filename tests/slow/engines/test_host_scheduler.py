"""vLLM's scheduler with a tier in host memory, driven without a model: what is kept, told and
reloaded."""

import random
import time
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvroute.blocks.cache_groups import HOST_GROUPS
from kvroute.blocks.chain import Scope, Space
from kvroute.blocks.tiers import HOST
from kvroute.contract.keep import Order, RetentionHint
from kvroute.replica.block_table import Changes
from kvroute.router.placement.fleet import Fleet
from tests.support.engines import PULLING
from tests.support.host_tiers import BLOCK_BYTES
from tests.support.records import record
from tests.support.schedulers import BLOCK

if TYPE_CHECKING:
    from tests.support.host_tiers import Tiered

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own

PROMPT = 10 * BLOCK + 1  # tokens


def tiered(*specs: Any, **options: Any) -> "Tiered":
    from tests.support.host_tiers import Tiered

    return Tiered(*specs, **options)


def flood(engine: "Tiered", prompts: int = 8, keep: RetentionHint | None = None) -> None:
    """Each evicts ten blocks."""
    for number in range(prompts):
        engine.ask(5000 + 500 * number, PROMPT, keep)


def test_what_left_the_engines_memory_is_found_in_host_memory() -> None:
    engine = tiered(host_blocks=128)
    assert engine.division.group_entries == (0, HOST_GROUPS)
    assert engine.ask(0, PROMPT) == 0
    alone = set(engine.table.held())
    assert {HOST.fingerprint(each) for each in alone} == alone  # each is in both
    flood(engine)
    assert engine.ask(0, PROMPT) == PROMPT - 1
    assert sum(transfer.reloaded_tokens for transfer in engine.transfers) == PROMPT - 1
    assert len(engine.table.in_host) == 90
    assert engine.compare().drift == 0


def test_a_tier_that_was_slow_is_not_reloaded_from() -> None:
    engine = tiered(host_blocks=128)
    engine.in_s = 60.0
    engine.ask(0, PROMPT)
    flood(engine)
    assert engine.ask(0, PROMPT) == PROMPT - 1  # nobody knew
    flood(engine)
    assert engine.ask(0, PROMPT) == 0
    assert sum(transfer.reloaded_tokens for transfer in engine.transfers) == PROMPT - 1


def test_a_tier_that_was_slow_is_tried_again_after_some_minutes() -> None:
    engine = tiered(host_blocks=128)
    engine.in_s = 60.0
    engine.ask(0, PROMPT)
    flood(engine)
    engine.ask(0, PROMPT)  # nobody knew
    for _ in range(5):  # however many are refused
        flood(engine)
        assert engine.ask(0, PROMPT) == 0
    engine.in_s = 1e-6
    engine.scheduler.host.meter.clock = lambda: time.monotonic() + 7_200.0
    flood(engine)
    assert engine.ask(0, PROMPT) == PROMPT - 1


@pytest.mark.parametrize(("prompt", "told"), [(0, 0), (2 * BLOCK, 0), (PROMPT, 0), (2048, 1)])
def test_steps_for_answers_say_nothing_about_the_speed_of_prompts(prompt: int, told: int) -> None:
    engine = tiered(blocks=400, max_num_seqs=100)
    names = [engine.add(100 * number, 1, answer=8) for number in range(80)]
    engine.step()
    heard: list[float] = []
    engine.scheduler.host.meter.price.record_step = lambda predicted_s, _: heard.append(predicted_s)
    if prompt:
        engine.add(20_000, prompt)
    engine.step()
    engine.step()
    assert all(name in engine.scheduler.requests for name in names)
    assert len(heard) == told
    assert all(seconds > 0 for seconds in heard)
    engine.run()


def test_the_block_of_the_last_token_is_computed() -> None:
    engine = tiered(host_blocks=128)
    engine.ask(0, 4 * BLOCK)
    assert engine.ask(0, 4 * BLOCK) == 3 * BLOCK
    flood(engine)
    assert engine.ask(0, 4 * BLOCK) == 3 * BLOCK


def test_host_memory_drops_what_will_not_come_back() -> None:
    engine = tiered(host_blocks=40)
    engine.ask(0, PROMPT, RetentionHint(session=1))
    engine.ask(1000, PROMPT, RetentionHint(Order.UNLIKELY))
    flood(engine, keep=RetentionHint(Order.UNLIKELY))
    assert engine.ask(1000, PROMPT) == 0
    assert engine.ask(0, PROMPT) == PROMPT - 1
    assert engine.compare().drift == 0


def test_host_memory_drops_the_blocks_of_an_ended_session_first() -> None:
    engine = tiered(host_blocks=40)
    engine.ask(0, PROMPT, RetentionHint(session=1))
    engine.ask(1000, PROMPT, RetentionHint(session=2))
    engine.scheduler.end_session(2)
    engine.scheduler.end_session(3)  # nobody's
    flood(engine, 3)
    assert engine.ask(0, PROMPT) == PROMPT - 1
    assert engine.ask(1000, PROMPT) == 0


def test_of_a_prompt_the_last_blocks_go_first() -> None:
    engine = tiered(blocks=12, host_blocks=24)
    engine.ask(0, PROMPT)
    flood(engine, 1)
    engine.ask(3000, 8 * BLOCK + 1)
    assert engine.ask(0, PROMPT) == 6 * BLOCK
    assert engine.compare().drift == 0


def test_of_a_prompt_with_more_blocks_than_host_memory_the_first_ones_are_kept() -> None:
    engine = tiered(blocks=64, host_blocks=16)
    engine.ask(0, 40 * BLOCK + 1)
    engine.ask(0, 12 * BLOCK + 1)
    chain = Space("m", "", BLOCK).chain(np.arange(16 * BLOCK, dtype=np.uint32), Scope())
    assert set(engine.table.in_host.values()) == set(map(HOST.fingerprint, chain))
    assert engine.compare().drift == 0


def test_a_clear_empties_both_tiers_whenever_it_comes() -> None:
    engine = tiered(host_blocks=128)
    name = engine.add(0, PROMPT)
    while name in engine.scheduler.requests:
        engine.step()
    for _ in range(2):  # copies are under way
        assert engine.scheduler.reset_prefix_cache()
        assert len(engine.table) == 0
    engine.run()
    assert engine.compare().blocks == 0
    assert engine.ask(0, PROMPT) == 0
    engine.add(0, PROMPT, answer=4)
    engine.step()
    assert not engine.scheduler.reset_prefix_cache()  # it is running
    engine.run()
    assert len(engine.table.in_host) == 10


def test_host_memory_is_never_cleared_alone() -> None:
    engine = tiered(host_blocks=128)
    engine.ask(0, PROMPT)
    engine.add(1000, PROMPT, answer=4)
    engine.step()
    assert not engine.scheduler.reset_prefix_cache(reset_connector=True)
    assert engine.scheduler.reset_connector_cache()
    engine.run()
    assert len(engine.table.in_host) == 20
    assert engine.compare().drift == 0


def test_a_session_that_ends_while_its_blocks_are_copied_is_over_for_them_too() -> None:
    engine = tiered(host_blocks=40)
    engine.ask(0, PROMPT, RetentionHint(session=1))
    name = engine.add(1000, PROMPT, RetentionHint(session=2))
    while name in engine.scheduler.requests:
        engine.step()
    host = engine.scheduler.host
    assert not any(each.is_ready for each in chunks_of(engine, name))
    engine.scheduler.end_session(2)
    engine.run()
    flood(engine, 3)
    assert engine.ask(0, PROMPT) == PROMPT - 1
    assert engine.ask(1000, PROMPT) == 0
    assert 2 not in host._policy._idle._owned


def chunks_of(engine: "Tiered", name: str) -> list[Any]:
    """Of a request that has ended, the blocks in host memory and those on their way."""
    connector, policy = engine.scheduler.connector, engine.scheduler.host._policy
    keys = connector.scheduler._req_status[name].req_context._offload_key_positions
    return [policy.chunks[key] for key in keys if key in policy.chunks]


def test_without_the_option_there_is_no_connector() -> None:
    from kvroute.replica.vllm_engine.host.args import host_args
    from kvroute.settings.replica import ReplicaSettings

    own: Any = {"served_model_name": "m", "redis_url": ""}
    off = ReplicaSettings(**own)
    uncached = ReplicaSettings(**own, host_cache_gb="50%", prefix_caching=False)
    assert host_args(off, node_bytes=1 << 40, on_cpu=True) == {}
    assert host_args(uncached, node_bytes=1 << 40, on_cpu=True) == {}


@pytest.mark.parametrize(("on_cpu", "spec_name"), [(True, "HostTierSpec"), (False, None)])
def test_the_tiers_behind_host_memory_are_off_unless_they_are_asked_for(
    on_cpu: bool, spec_name: str | None
) -> None:
    from kvroute.replica.vllm_engine.host.args import host_args, slower_tiers
    from kvroute.settings.replica import ReplicaSettings

    own: Any = {"served_model_name": "m", "redis_url": "", "host_cache_gb": "0.001"}
    for fields in ({}, {"replica_features": PULLING}, {"disk_cache": "/disk"}):
        settings = ReplicaSettings(**own, **fields)
        transfer = host_args(settings, node_bytes=1 << 40, on_cpu=on_cpu)["kv_transfer_config"]
        extra = transfer.kv_connector_extra_config
        assert bool(slower_tiers(settings)) == bool(fields)
        assert extra.get("spec_name") == ("FabricSpec" if fields else spec_name)
        assert bool(extra.get("secondary_tiers")) == bool(fields)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"engine_args": {"kv_offloading_size": 1}}, "--engine-args has kv_offloading_size"),
        ({"host_cache_gb": "2000"}, "set a lower value, for example 30%"),
    ],
)
def test_what_cannot_be_is_refused(fields: dict[str, Any], words: str) -> None:
    from kvroute.contract.generation import CannotRunError
    from kvroute.replica.vllm_engine.host.args import host_args
    from kvroute.settings.replica import ReplicaSettings

    own = {"served_model_name": "m", "redis_url": "", "host_cache_gb": "1"} | fields
    with pytest.raises(CannotRunError, match=words):
        host_args(ReplicaSettings(**own), node_bytes=10**12, on_cpu=True)


def test_a_tier_of_a_few_blocks_is_refused() -> None:
    from kvroute.contract.generation import CannotRunError
    from kvroute.replica.vllm_engine.host.args import check_tier
    from kvroute.settings.replica import ReplicaSettings

    small = ReplicaSettings(served_model_name="m", redis_url="", host_cache_gb="0.00001")
    division = tiered(host_blocks=2).division
    with pytest.raises(CannotRunError, match=r"set at least 0\.001"):
        check_tier(small, division, is_caching=True)
    with pytest.raises(CannotRunError, match="leave --host-cache-gb out"):
        check_tier(small, division, is_caching=False)


def test_a_tier_without_a_block_for_each_group_is_refused_in_words() -> None:
    from kvroute.blocks.cache_groups import CacheGroup
    from kvroute.contract.generation import CannotRunError
    from kvroute.replica.vllm_engine.blocks.division import Division
    from kvroute.replica.vllm_engine.host.args import check_tier
    from kvroute.settings.replica import ReplicaSettings

    settings = ReplicaSettings(served_model_name="m", redis_url="", host_cache_gb="0.0001")
    groups = tuple(CacheGroup("sliding_window", BLOCK, 16 * number) for number in range(1, 20))
    for host_blocks in (1, 18, 100, 303):
        division = Division(BLOCK, BLOCK, groups, 100, host_blocks, BLOCK_BYTES)
        assert (division.host_tier(1e9) is None) == (host_blocks < 19)
        with pytest.raises(CannotRunError, match=r"set at least 0\.003"):
            check_tier(settings, division, is_caching=True)
    check_tier(settings, Division(BLOCK, BLOCK, groups, 100, 304, BLOCK_BYTES), is_caching=True)


steps = st.lists(
    st.tuples(
        st.sampled_from(["add", "add", "add", "step", "step", "run", "abort", "end", "clear"]),
        st.integers(0, 11),
        st.integers(1, 12),
    ),
    max_size=40,
)


@pytest.mark.parametrize("kind", ["full", "window", "chunk", "state"])
@settings(max_examples=40, deadline=None)
@given(steps=steps, host_blocks=st.sampled_from([16, 60]))
@example(steps=[("add", 0, 1), ("end", 0, 1)], host_blocks=16)  # of a request that said nothing
def test_the_table_is_what_both_tiers_hold(
    kind: str, steps: list[tuple[str, int, int]], host_blocks: int
) -> None:
    engine = shared(kind, host_blocks)
    names: list[str] = []
    for do, number, blocks in steps:
        match do:
            case "add":
                keep = RetentionHint(Order(number % 3), session=number) if number % 2 else None
                names.append(engine.add(300 * number, blocks * BLOCK + number, keep))
            case "step":
                engine.step()
            case "run":
                engine.run()
            case "abort" if names:
                engine.abort(names[number % len(names)])
            case "end":
                engine.scheduler.end_session(number)
            case "clear":
                engine.scheduler.reset_prefix_cache()
    engine.run()
    assert engine.compare().drift == 0
    assert engine.scheduler.reset_prefix_cache()
    assert len(engine.table) == 0


@cache
def shared(kind: str, host_blocks: int) -> "Tiered":
    """Making one takes a second."""
    from tests.support.kv_managers import chunk, full, state, window

    more, options = {
        "full": ([], {}),
        "window": ([window(BLOCK, 40)], {}),
        "chunk": ([chunk(BLOCK, 4 * BLOCK)], {}),
        "state": ([state(BLOCK)], {"mamba_cache_mode": "align"}),
    }[kind]
    blocks = 24 * (1 + len(more))
    return tiered(full(BLOCK), *more, blocks=blocks, host_blocks=host_blocks, **options)


def test_the_window_of_a_prompt_is_reloaded_with_it() -> None:
    engine = shared("window", 400)
    engine.ask(0, PROMPT)
    flood(engine)
    assert engine.ask(0, PROMPT) == PROMPT - 1
    assert engine.division.group_entries == (0, 1, HOST_GROUPS, HOST_GROUPS + 1)


def test_the_last_state_of_a_prompt_is_reloaded_with_it() -> None:
    engine = shared("state", 4000)
    assert engine.scheduler.reset_prefix_cache()
    engine.ask(0, PROMPT)
    assert len(engine.table) == 22  # in each memory ten blocks, and the state behind the last one
    flood(engine)
    assert engine.ask(0, PROMPT) == PROMPT - 1
    assert engine.ask(0, PROMPT - BLOCK) == 0  # its state is not kept
    assert engine.division.group_entries == (0, 1, HOST_GROUPS, HOST_GROUPS + 1)


@pytest.mark.parametrize("kind", ["full", "window", "chunk", "state"])
@settings(max_examples=30, deadline=None)
@given(asked=st.lists(st.tuples(st.integers(0, 4), st.integers(1, 200)), max_size=16))
def test_a_router_expects_of_both_tiers_what_vllm_finds(
    kind: str, asked: list[tuple[int, int]]
) -> None:
    """But for prompts of whole blocks: of these, vLLM may reload all but the last token."""
    engine = shared(kind, 4000)
    assert engine.scheduler.reset_prefix_cache()
    router = Router(engine)
    for text, tokens in asked:
        tokens += tokens % BLOCK == 0
        expected = router.expected(300 * text, tokens)
        assert engine.ask(300 * text, tokens) == expected
    assert engine.compare().drift == 0


class Router:
    """It knows what the engine tells, and of copies that take no time."""

    def __init__(self, engine: "Tiered") -> None:
        division = engine.division
        host = division.host_tier(1e15)
        facts = {"layout": division.layout, "host": host, "prefill_tokens_per_s": 1.0}
        self._engine = engine
        self._fleet = Fleet(model="m", revision="", block_size=BLOCK, rng=random.Random(0))
        self._fleet.mirror.join("a")
        self._fleet.update([record("a", block_size=BLOCK, **facts)])
        engine.changes = Changes()

    def expected(self, first_id: int, tokens: int) -> int:
        """Tokens of a prompt's hit."""
        changes, self._engine.changes = self._engine.changes, Changes()
        self._fleet.mirror.remove("a", changes.removed)
        self._fleet.mirror.add("a", changes.added)
        token_ids = np.arange(first_id, first_id + tokens, dtype=np.uint32)
        return self._fleet.place(token_ids, ["a"], 0.0).expected_tokens("a")
