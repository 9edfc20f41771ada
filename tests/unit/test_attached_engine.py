"""The table of an attached server's blocks claims nothing that the server does not have."""

import asyncio
import json
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from prometheus_client import CollectorRegistry

from kvroute.blocks.cache_groups import HOST_GROUPS, CacheGroup, Layout, group_fingerprint
from kvroute.blocks.chain import EVERYBODY, Scope, Space
from kvroute.blocks.fingerprint import Fingerprint
from kvroute.contract.records import Description, EngineFacts, TierFacts
from kvroute.replica import publisher as publisher_module
from kvroute.replica.attached_engine import server_connection as connection_module
from kvroute.replica.attached_engine.attached import AttachedEngine
from kvroute.replica.attached_engine.server_cache.cached_blocks import ServerBlocks
from kvroute.replica.attached_engine.server_cache.wire import decode_batch
from kvroute.replica.attached_engine.server_client import Reply
from kvroute.replica.attached_engine.server_connection import ServerConnection
from kvroute.replica.attached_engine.server_facts import EventAddress, RankFacts, ServerFacts
from kvroute.replica.block_table import BlockTable, Changes
from kvroute.replica.engine.kv_events import BlockStored, KVEvent, LayoutChanged, Transfers
from kvroute.replica.engine_metrics import ReplicaMetrics
from kvroute.replica.rank import Rank
from kvroute.replica.sim_engine.config import SimulatedConfig
from kvroute.replica.sim_engine.simulated import SimulatedEngine
from kvroute.store.index_values import WriterState
from tests.support.kv_publisher import Publisher, publishing, two_ports
from tests.support.scripted_client import Asked, ScriptedClient

SIZE = 4  # tokens in a block
SPACE = Space("model", "", SIZE)
PROMPT = tuple(range(100, 100 + 3 * SIZE))
CACHE_BLOCKS = 500
Event = dict[str, Any]

FULL: Event = {"group_idx": 0, "kv_cache_spec_kind": "full_attention"}
WINDOW: Event = {
    "group_idx": 1,
    "kv_cache_spec_kind": "sliding_window",
    "kv_cache_spec_sliding_window": SIZE + 1,
}
CLEARED: Event = {"type": "AllBlocksCleared"}
# The fields that each of vLLM 0.26 to 0.33 publishes besides those of all versions.
VERSIONS: Mapping[str, Event] = {
    "no field": {},
    "medium": {"lora_id": None, "medium": "GPU"},
    "keys": {"lora_id": None, "medium": "GPU", "lora_name": None, "extra_keys": None},
    "groups": {"medium": "GPU", **FULL, "kv_cache_spec_sliding_window": None},
    "sessions": {"medium": "GPU", **FULL, "locality": None, "ownership": None, "session_id": "s"},
    "tomorrow": {"medium": "GPU", **FULL, "metadata_only": False, "new": {"x": [1]}},
}


def hash_of(prompt: tuple[int, ...]) -> int:
    return hash(prompt) & (2**64 - 1)


def stored(prompt: tuple[int, ...], *numbers: int, first: int = 0, **more: Any) -> Event:
    """The event for a prompt's blocks from `first` on, or for only some of them."""
    ends = range(first + 1, len(prompt) // SIZE + 1)
    hashes = [hash_of(prompt[: end * SIZE]) for end in ends]
    return {
        "type": "BlockStored",
        "block_hashes": [hashes[number] for number in numbers] if numbers else hashes,
        "parent_block_hash": hash_of(prompt[: first * SIZE]) if first else None,
        "token_ids": list(prompt[first * SIZE :]),
        "block_size": SIZE,
        **more,
    }


def in_host(prompt: tuple[int, ...], **more: Any) -> Event:
    """The event of vLLM's offloading connector that does not describe the blocks."""
    return stored(prompt) | {"token_ids": [], "block_size": 0, "medium": "CPU", **more}


def removed(*hashes: int, **more: Any) -> Event:
    return {"type": "BlockRemoved", "block_hashes": [*hashes], **more}


def chain(prompt: tuple[int, ...], lora: str = "") -> list[Fingerprint]:
    scope = Scope(lora) if lora else EVERYBODY
    return SPACE.chain(np.array(prompt, np.uint32), scope)


def in_group(fingerprints: list[Fingerprint], entry: int) -> set[int]:
    return {int(group_fingerprint(each, entry)) for each in fingerprints}


class Attached:
    """An engine, what it publishes, and its server: a publisher of events and some metrics."""

    def __init__(self, publisher: Publisher, ports: tuple[int, int]) -> None:
        self.publisher = publisher
        self.metrics = {'vllm:num_requests_running{engine="0"}': 0.0}
        self.connection = ServerConnection("http://gpu-1", {})
        self.connection.client = ScriptedClient("http://gpu-1", self._answer)
        live, replay = (f"tcp://127.0.0.1:{port}" for port in ports)
        events = EventAddress(live, replay, topic="")
        rank = RankFacts(SIZE, CACHE_BLOCKS, True, 1000.0, events)
        server = ServerFacts("m", "m", 4096, "", [rank])
        facts = EngineFacts(SIZE, CACHE_BLOCKS, 4096, 1000.0)
        self.engine = AttachedEngine(self.connection, facts, server, 0, SPACE)
        self.table = BlockTable(self.engine.group_entries)
        self.events: list[KVEvent] = []

    def _answer(self, asked: Asked) -> Reply:
        if asked.path == "/v1/models":
            return Reply(200, json.dumps({"data": [{"id": "m", "root": "m"}]}).encode())
        caches = 'vllm:cache_config_info{block_size="4",num_gpu_blocks="501",engine="0"} 1.0\n'
        lines = (f"{name} {value}\n" for name, value in self.metrics.items())
        return Reply(200, (caches + "".join(lines)).encode())

    def call(self, path: str, status: str = "2xx") -> None:
        """Count a call of the server as vLLM's /metrics does."""
        name = f'http_requests_total{{handler="{path}",method="POST",status="{status}"}}'
        self.metrics[name] = self.metrics.get(name, 0.0) + 1.0

    async def read(self) -> None:
        async for events in self.engine.events():
            self.table.apply(events, Changes())
            self.events += events

    @property
    def held(self) -> set[int]:
        return {int(each) for each in self.table.held()}

    async def wait_until(self, is_true: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not is_true():
                await asyncio.sleep(0.01)

    async def wait_for(self, *expected: set[int]) -> None:
        await self.wait_until(lambda: self.held == set[int]().union(*expected))

    async def observe(self) -> None:
        """Wait until the metrics were read again."""
        for _ in range(2):
            before = self.connection.samples
            await self.wait_until(lambda before=before: self.connection.samples is not before)  # type: ignore[misc]


@asynccontextmanager
async def attached(*, kept: int = 100) -> AsyncIterator[Attached]:
    ports = two_ports()
    async with publishing(ports, kept=kept) as publisher:
        server = Attached(publisher, ports)
        server.engine.start()
        reading = asyncio.create_task(server.read())
        try:
            yield server
        finally:
            reading.cancel()
            await server.engine.close()


@pytest.fixture(autouse=True)
def _quick_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_module, "CHECK_INTERVAL_S", 0.02)


# Events of all versions, through the real path.


async def test_the_events_of_all_versions_and_unknown_ones_are_followed() -> None:
    async with attached() as server:
        expected = set[int]()
        for number, fields in enumerate(VERSIONS.values()):
            prompt = (number, *PROMPT[1:])
            await server.publisher.send(
                {"type": "BlockMoved", "to": "CPU"},
                stored(prompt, **fields),
                removed(hash_of(prompt[:SIZE]), **fields),
            )
            expected |= {*chain(prompt)[1:]}
        await server.wait_for(expected)


async def test_an_event_with_a_wrong_type_forgets_all_and_hits_report_it_again() -> None:
    async with attached() as server:
        await server.publisher.send(stored(PROMPT))
        await server.wait_for({*chain(PROMPT)})
        await server.publisher.send({**stored(PROMPT), "token_ids": "many"})
        await server.wait_for(set())
        await server.publisher.send(stored(PROMPT))  # the report of a hit
        await server.wait_for({*chain(PROMPT)})
        await server.publisher.send(removed(*stored(PROMPT)["block_hashes"]))
        await server.wait_for(set())


async def test_lost_events_are_replayed_and_a_gap_behind_the_buffer_forgets() -> None:
    async with attached(kept=3) as server:
        await server.publisher.send(stored(PROMPT))
        await server.wait_for({*chain(PROMPT)})
        await server.publisher.send(removed(hash_of(PROMPT)), is_lost=True)
        await server.wait_for({*chain(PROMPT)[:2]})
        other = (7, *PROMPT[1:])
        for _ in range(4):
            await server.publisher.send(is_lost=True)
        await server.publisher.send(stored(other))
        await server.wait_for({*chain(other)})


async def test_groups_are_learned_from_events_in_any_order() -> None:
    async with attached() as server:
        await server.publisher.send(stored(PROMPT, **FULL))
        await server.wait_for({*chain(PROMPT)})
        longer = (*PROMPT, *PROMPT)
        await server.publisher.send(
            stored(longer, 2, first=3, **WINDOW),  # it is stored before its tokens are known
            stored(longer, first=3, **FULL),
        )
        await server.wait_for({*chain(longer)}, in_group(chain(longer)[-1:], 1))
        changed = [event for event in server.events if isinstance(event, LayoutChanged)]
        assert [event.facts for event in changed] == [server.engine.facts]
        window = CacheGroup("sliding_window", SIZE, SIZE + 1)
        layout = Layout((CacheGroup("full_attention", SIZE), window), SIZE)
        assert server.engine.facts.layout == layout
        assert server.engine.facts.capacity_blocks == CACHE_BLOCKS // 2
        await server.publisher.send(removed(hash_of(longer), group_idx=1))
        await server.wait_for({*chain(longer)})


async def test_a_parent_that_comes_later_and_a_removal_that_comes_before() -> None:
    async with attached() as server:
        await server.publisher.send(
            stored(PROMPT, first=1),  # left out: nothing names its first block
            removed(*stored(PROMPT)["block_hashes"][:1]),
            stored(PROMPT[:SIZE]),
        )
        await server.wait_for({*chain(PROMPT)[:1]})


# Host memory.


async def test_host_memory_counts_once_a_copy_from_it_was_measured() -> None:
    async with attached() as server:
        await server.publisher.send(stored(PROMPT, **FULL), in_host(PROMPT))
        await server.publisher.send(removed(*stored(PROMPT)["block_hashes"]))
        await server.wait_for(set())
        server.metrics |= {
            'vllm:external_prefix_cache_hits_total{engine="0"}': 100.0,
            'vllm:kv_offload_load_bytes_total{engine="0"}': 50_000.0,
            'vllm:kv_offload_load_time_total{engine="0"}': 0.5,
        }
        await server.wait_for(in_group(chain(PROMPT), HOST_GROUPS))
        host = server.engine.facts.host
        assert host is not None
        assert (host.blocks, host.block_bytes, host.bytes_per_s) == (3, 500 * SIZE, 1e5)
        server.metrics['vllm:kv_offload_load_bytes_total{engine="0"}'] += 1000.0
        server.metrics['vllm:kv_offload_load_time_total{engine="0"}'] += 0.25
        await server.wait_until(lambda: Transfers(0, 1000, 0.25) in server.events)
        await server.publisher.send(removed(hash_of(PROMPT), medium="CPU"))
        await server.wait_for(in_group(chain(PROMPT)[:2], HOST_GROUPS))


# What is gone without an event.


@pytest.mark.parametrize("path", ["/reset_prefix_cache", "/sleep", "/pause"])
async def test_an_idle_server_that_was_cleared_holds_nothing(path: str) -> None:
    async with attached() as server:
        await server.publisher.send(stored(PROMPT))
        await server.wait_for({*chain(PROMPT)})
        await server.observe()
        server.call(path)
        await server.wait_for(set())
        await server.publisher.send(CLEARED, stored(PROMPT))
        await server.wait_for({*chain(PROMPT)})


async def test_calls_that_fail_or_that_change_nothing_forget_nothing() -> None:
    async with attached() as server:
        server.call("/reset_prefix_cache")  # before kvroute came
        await server.publisher.send(stored(PROMPT))
        await server.wait_for({*chain(PROMPT)})
        await server.observe()
        server.call("/reset_prefix_cache", "4xx")
        server.call("/v1/load_lora_adapter", "4xx")
        server.call("/v1/completions")
        server.call("/is_sleeping")
        await server.observe()
        assert server.held == {*chain(PROMPT)}


async def test_other_files_of_an_adapter_make_the_blocks_of_adapters_useless() -> None:
    async with attached() as server:
        adapted = stored((1, *PROMPT[1:]), lora_name="sql")
        await server.publisher.send(stored(PROMPT), adapted)
        await server.wait_for({*chain(PROMPT)}, {*chain((1, *PROMPT[1:]), "sql")})
        await server.observe()
        server.call("/v1/load_lora_adapter")
        await server.wait_for({*chain(PROMPT)})


async def test_a_sleeping_server_is_away_until_it_wakes() -> None:
    async with attached() as server:
        awake = 'vllm:engine_sleep_state{engine="0",sleep_state="awake"}'
        server.metrics |= {awake: 1.0, awake.replace("awake", "discard_all"): 0.0}
        await server.observe()
        assert not server.connection.away_reason
        await server.publisher.send(stored(PROMPT))
        await server.wait_for({*chain(PROMPT)})
        server.metrics[awake] = 0.0
        await server.wait_for(set())
        async with asyncio.timeout(60):
            assert "wake_up" in await server.engine.wait_until_away()
            server.metrics[awake] = 1.0
            await server.engine.wait_until_back()


# The index.


class RecordedIndex:
    """An index without Redis: the facts of each registration, and the blocks of the last one."""

    def __init__(self) -> None:
        self.registered: list[EngineFacts] = []
        self.blocks = set[int]()

    async def register(
        self, replica_id: str, incarnation: str, *, description: Description, **_: Any
    ) -> WriterState:
        self.registered.append(description.facts)
        return WriterState(replica_id, incarnation)

    async def leave(self, replica_id: str, incarnation: str) -> None:
        self.blocks.clear()

    async def renew(self, writer_state: WriterState, **_: Any) -> None: ...

    async def change(
        self,
        writer_state: WriterState,
        *,
        cleared: bool = False,
        added: Sequence[Fingerprint] = (),
        removed: Sequence[Fingerprint] = (),
        **_: Any,
    ) -> WriterState:
        kept = set() if cleared else self.blocks - {*removed}
        self.blocks = kept | {int(each) for each in added}
        return writer_state


async def test_a_replica_registers_again_with_the_groups_and_tiers_that_it_has_learned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(publisher_module, "RETRY_S", 0.01)
    index, facts = RecordedIndex(), EngineFacts(SIZE, CACHE_BLOCKS, 4096, 1000.0)
    window = CacheGroup("sliding_window", SIZE, SIZE)
    layout = Layout((CacheGroup("full_attention", SIZE), window), SIZE)
    learned = replace(facts, layout=layout, host=TierFacts(10, 500, 1e9))
    rank = Rank(
        SimulatedEngine(SimulatedConfig()),
        index,  # type: ignore[arg-type]
        ReplicaMetrics(CollectorRegistry()),
        None,
        rank_id="r",
        description=Description(facts),
        lease_s=3.0,
        reports=dict,
    )
    publishing = asyncio.create_task(rank.publisher.run())
    one, two = (Fingerprint(each) for each in (1, 2))
    rank.publisher.publish([BlockStored([b"1"], [one])])
    entries = (0, 1, HOST_GROUPS, HOST_GROUPS + 1)
    changed: list[KVEvent] = [LayoutChanged(learned, entries), BlockStored([b"2"], [two], 1)]
    try:
        async with asyncio.timeout(60):
            while index.blocks != {one}:
                await asyncio.sleep(0.01)
            rank._record_events(changed)
            rank.publisher.publish([*changed])
            while index.blocks != in_group([two], 1):
                await asyncio.sleep(0.01)
        assert index.registered == [facts, learned]
        assert rank._load().host_bytes_per_s == 1e9
    finally:
        publishing.cancel()


# A modelled cache.


class ModelledCache:
    """A server's cache with copies, windows, host memory and evictions, and its events."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.blocks = Counter[tuple[str, int, int]]()  # medium, group and hash -> copies
        self.known: dict[int, Fingerprint] = {}

    def step(self, *, reports_hits: bool) -> list[Any]:
        """Return the events of a step, some of them unknown, twice, or in another order."""
        events = list[Any]()
        for _ in range(self.rng.randrange(1, 4)):
            events += self.rng.choice([self._compute, self._offload, self._evict, self._noise])()
        if reports_hits and self.rng.random() < 0.5:
            events += self._report()
        if self.rng.random() < 0.1:
            self.blocks.clear()
            events.append(CLEARED)
        return events

    def _prompt(self) -> tuple[int, ...]:
        first, second = self.rng.choices((1, 2), k=2)
        rest = PROMPT[: SIZE * self.rng.randrange(3)]
        prompt = (first,) * SIZE + (second,) * SIZE + rest
        for end, fingerprint in enumerate(chain(prompt), start=1):
            self.known[hash_of(prompt[: end * SIZE])] = fingerprint
        return prompt

    def _add(self, event: Event) -> Event:
        group, medium = event.get("group_idx") or 0, event.get("medium") or "GPU"
        self.blocks.update((medium, group, hash_) for hash_ in event["block_hashes"])
        return event

    def _compute(self) -> list[Event]:
        prompt = self._prompt()
        first = self.rng.randrange(len(prompt) // SIZE)
        last = len(prompt) // SIZE - 1 - first
        events = [
            self._add(stored(prompt, first=first, **FULL)),
            self._add(stored(prompt, last, first=first, **WINDOW)),
        ]
        self.rng.shuffle(events)
        return events

    def _offload(self) -> list[Event]:
        prompt = self._prompt()
        is_described, group = self.rng.random() < 0.5, self.rng.choice((FULL, WINDOW))
        event = stored(prompt, medium="CPU") if is_described else in_host(prompt)
        return [self._add({**event, **group})]

    def _evict(self) -> list[Event]:
        if not self.blocks:
            return []
        key = self.rng.choice([*self.blocks])
        self.blocks -= Counter([key])
        return [removed(key[2], medium=key[0], group_idx=key[1])]

    def _report(self) -> list[Event]:
        """Report a hit as vLLM does: for each group, all blocks of the prompt."""
        prompt = self._prompt()
        ends = [hash_of(prompt[: end * SIZE]) for end in range(1, len(prompt) // SIZE + 1)]
        if not all(("GPU", 0, hash_) in self.blocks for hash_ in ends):
            return []
        events = [stored(prompt, **FULL)]
        if ("GPU", 1, ends[-1]) in self.blocks:
            events.append(stored(prompt, **WINDOW))
        return events

    def _noise(self) -> list[Any]:
        """Return an event that changes nothing at the server's own blocks."""
        prompt = self._prompt()
        return [
            self.rng.choice(
                [
                    {"type": "BlockMoved"},
                    stored(prompt, medium="STORAGE"),
                    stored(prompt, medium="CPU", locality="REMOTE"),
                    stored(prompt, metadata_only=True),
                    removed(hash_of((0,))),
                    removed(hash_of((0,)), medium="CPU", group_idx=9),
                ]
            )
        ]

    def claimable(self) -> set[int]:
        """Return all fingerprints that a table may claim, in the layout of both groups."""
        return {
            int(group_fingerprint(self.known[hash_], group + HOST_GROUPS * (medium == "CPU")))
            for medium, group, hash_ in self.blocks
        }


@given(seed=st.integers(0, 2**32), reports_hits=st.booleans())
def test_the_table_never_claims_a_block_that_the_cache_does_not_have(
    seed: int, reports_hits: bool
) -> None:
    cache, blocks, claimed = ModelledCache(seed), ServerBlocks(SPACE), 0
    blocks.groups.add_host()
    blocks.reports_hits = reports_hits
    table, layout = BlockTable(blocks.groups.group_entries), blocks.layout
    for _ in range(20):
        payload = msgspec.msgpack.encode([0.0, cache.step(reports_hits=reports_hits)])
        changes = blocks.apply(decode_batch(payload, Counter()))
        if blocks.layout != layout:
            table, layout = BlockTable(blocks.groups.group_entries), blocks.layout
            changes = blocks.stored()
        table.apply(changes, Changes())
        held = {int(each) for each in table.held()}
        if len(blocks.groups.group_entries) == 4:
            assert held <= cache.claimable()
        assert {int(each) for each in _all(blocks)} == held
        claimed += len(held)


def _all(blocks: ServerBlocks) -> list[Fingerprint]:
    """Return what a new table of all blocks would publish."""
    table = BlockTable(blocks.groups.group_entries)
    table.apply(blocks.stored(), Changes())
    return table.held()


@pytest.mark.parametrize("seed", range(3))
async def test_after_losses_and_nonsense_the_engine_claims_only_what_the_server_has(
    seed: int,
) -> None:
    cache = ModelledCache(seed)
    async with attached(kept=8) as server:
        server.engine._cached.groups.add_host()
        for step in range(40):
            if step % 13 == 7:
                await server.publisher.send_raw(b"\xc1")
            await server.publisher.send(*cache.step(reports_hits=False), is_lost=step % 5 == 3)
        last = (9, *PROMPT[1:])
        await server.publisher.send(stored(last))
        cache.known |= {
            hash_of(last[: end * SIZE]): each
            for end, each in zip((1, 2, 3), chain(last), strict=True)
        }
        cache.blocks.update(("GPU", 0, hash_) for hash_ in stored(last)["block_hashes"])
        await server.wait_until(lambda: {*chain(last)} <= server.held)
        assert server.held <= cache.claimable()
