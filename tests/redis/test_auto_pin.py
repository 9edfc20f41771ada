"""What is hot and unnamed is declared, within half of what pins may take, until it has cooled."""

import asyncio
import random
import time
import uuid
from collections.abc import AsyncIterator

import numpy as np
import pytest
from msgspec import structs

from kvroute.contract.generation import TokenIds
from kvroute.contract.records import Warm
from kvroute.router.placement.fleet import Fleet
from kvroute.router.prefixes.auto_pin import AutoPin
from kvroute.router.prefixes.catalogue import Catalogue
from kvroute.router.prefixes.hot import HotPrefixes
from kvroute.router.prompts.tokenizer import Prompts
from kvroute.store.connection import connect
from kvroute.store.prefixes import Prefix, Prefixes
from tests.support.records import record

BLOCK = 4
BUDGET = 50  # blocks; 25 of them for what is pinned by itself


@pytest.fixture
async def store(redis_url: str) -> AsyncIterator[Prefixes]:
    client = connect(redis_url)
    yield Prefixes(client, uuid.uuid4().hex)
    await client.aclose()


class Scene:
    """One router, and a second's worth of requests for some prefixes."""

    def __init__(self, store: Prefixes, prompts: Prompts) -> None:
        self.now_s = time.monotonic()
        self.fleet = Fleet(model="m", revision="", block_size=BLOCK, rng=random.Random(1))
        self.fleet.update([record("a", pin_blocks=BUDGET)])
        self.catalogue = Catalogue(store, self.fleet, block_size=BLOCK)
        self.hot = HotPrefixes(block_size=BLOCK)
        self.auto_pin = AutoPin(self.hot, self.fleet, self.catalogue, prompts)

    def use(self, token_ids: TokenIds, times: int) -> None:
        """So many prompts found all of it cached; each goes on with a block of its own."""
        for _ in range(times):
            chain = self.fleet.caches.chain(np.append(token_ids, np.zeros(BLOCK + 1, np.uint32)))
            self.hot.see(token_ids, chain, len(token_ids), self.now_s)

    def keep_warm(self, prefix: Prefix, blocks: int) -> None:
        """Replica a says that it keeps the prefix, and has so many of its blocks."""
        kept = record("a", pin_blocks=BUDGET)
        kept = structs.replace(kept, pins={prefix.name: Warm(10, is_pinned=False)})
        self.fleet.update([kept])
        self.fleet.mirror.join("a")
        chain = self.fleet.caches.chain(np.append(prefix.token_ids, np.uint32(0)))
        self.fleet.mirror.add("a", chain[:blocks])

    def chosen(self) -> list[list[int]]:
        return [hot.token_ids.tolist() for hot in self.auto_pin.worth_keeping(self.now_s)]


@pytest.fixture
def scene(store: Prefixes, prompts: Prompts) -> Scene:
    return Scene(store, prompts)


def text(first: int, blocks: int) -> TokenIds:
    return np.arange(first, first + blocks * BLOCK, dtype=np.uint32)


def test_what_saves_too_little_is_left_alone(scene: Scene) -> None:
    """At 1000 tokens/s, 40 tokens have to be saved more than once a second."""
    scene.use(text(100, 10), times=60)
    assert scene.chosen() == []
    scene.use(text(100, 10), times=60)
    assert scene.chosen() == [text(100, 10).tolist()]


def test_only_half_of_what_pins_may_take_is_used(scene: Scene) -> None:
    for first, blocks, times in ((100, 15, 900), (200, 12, 800), (300, 9, 700), (400, 40, 500)):
        scene.use(text(first, blocks), times)
    assert scene.chosen() == [text(100, 15).tolist(), text(300, 9).tolist()]


async def test_what_has_a_name_needs_none(scene: Scene, store: Prefixes) -> None:
    token_ids = np.append(text(100, 10), np.uint32(7))
    await store.declare("law", token_ids=token_ids, source={"prompt": "?"})
    await scene.catalogue.refresh()
    scene.use(text(100, 10), times=500)
    assert scene.chosen() == []


async def test_what_is_hot_is_declared_for_a_while(
    scene: Scene, store: Prefixes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvroute.router.prefixes.auto_pin.CHECK_INTERVAL_S", 0.01)
    scene.use(text(100, 10), times=500)
    task = asyncio.create_task(scene.auto_pin.run())
    async with asyncio.timeout(10):
        while not (declared := await store.all()):
            await asyncio.sleep(0.01)
    await asyncio.sleep(0.05)
    task.cancel()
    assert [prefix.version for prefix in await store.all()] == [1]
    assert declared[0].id.startswith("auto-")
    assert declared[0].token_ids.tolist() == text(100, 10).tolist()
    assert declared[0].expires_at_s
    assert not declared[0].is_pinned


async def test_what_was_evicted_in_spite_of_its_promise_is_pinned(
    scene: Scene, store: Prefixes
) -> None:
    token_ids = text(100, 10)
    scene.use(token_ids, times=500)
    (hot,) = scene.auto_pin.worth_keeping(scene.now_s)
    await scene.auto_pin._declare(hot)
    (promised,) = await store.all()
    scene.keep_warm(promised, blocks=10)
    await scene.auto_pin._declare(hot)
    assert await store.all() == [promised]
    scene.keep_warm(promised, blocks=9)
    await scene.auto_pin._declare(hot)
    assert await store.all() == [promised]
    await scene.auto_pin._declare(hot)
    assert [(each.version, each.is_pinned) for each in await store.all()] == [
        (1, False),
        (2, True),
    ]
