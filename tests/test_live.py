"""Who listens learns what changed; the sums are of the last minutes; a decision has its receipt."""

import asyncio
import json
import random
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
from ray.exceptions import RayActorError

from replica.kvindex.fingerprint import Fingerprint
from replica.kvindex.index import NO_PINS, Index, ReplicaRecord, Warm, connect
from replica.kvindex.prefixes import Prefixes
from replica.model import BUILTIN_MODEL
from replica.protocol import Chunk
from router.api.errors import ApiError
from router.api.prompt import Prompts
from router.insight.live import LISTENERS, Live, State
from router.insight.recent import BUCKET_S, DECISIONS, WINDOW_S, Recent, Window
from router.insight.view import RECEIPT_REPLICAS, View
from router.named.hot import HotPrefixes
from router.named.hottest import Hottest
from router.named.prefixes import Catalogue
from router.routing.feed import Feed
from router.routing.fleet import Fleet
from router.routing.ledger import CAUSES, Ledger, account
from router.routing.peers import Listener
from router.routing.trips import Trip
from router.settings import RouterSettings
from router.streams.watch import DOUBTED_LOOKS, Watch
from tests.conftest import openai_client
from tests.records import FACTS, LOAD
from tests.serving import Cluster, start_cluster
from tests.waiting import until

PROMPTS = np.random.default_rng(7).integers(1000, 9000, (5, 100)).tolist()  # 3 blocks and 4 tokens


# What is remembered of requests.


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def ledger(tokens: int, delivered: int = 0) -> Ledger:
    return account(tokens, cacheable=tokens, reusable=0, expected=0, delivered=delivered)


def test_sums_are_of_the_window_whenever_they_are_read() -> None:
    clock, rng = Clock(), random.Random(0)
    window, added = Window(clock), list[tuple[float, str, int]]()
    for _ in range(2000):
        clock.now_s += rng.expovariate(0.3)
        replica_id, tokens = rng.choice("abc"), rng.randrange(100)
        window.add(replica_id, ledger(tokens))
        added.append((clock.now_s, replica_id, tokens))
        oldest_s = BUCKET_S * (clock.now_s // BUCKET_S + 1) - WINDOW_S
        expected = Counter[str]()
        for at_s, name, count in added:
            if at_s >= oldest_s:
                expected[name] += count
        assert {name: sums.tokens.new for name, sums in window.sums().items()} == expected


def test_a_replica_without_a_request_in_the_window_is_forgotten() -> None:
    clock = Clock()
    window = Window(clock)
    window.add("gone", ledger(10, delivered=4))
    assert (window.sums()["gone"].hit_tokens, window.sums()["gone"].prompt_tokens) == (4, 10)
    clock.now_s += WINDOW_S
    assert window.sums() == {}
    assert not window._buckets


class Serving:
    """What Serve runs, and can do to it, as routes.Replicas."""

    def __init__(self, names: list[str]) -> None:
        self.names = names
        self.hung: set[str] = set()

    def ids(self) -> list[str]:
        return self.names

    async def ask(self, replica_id: str) -> None:
        if replica_id in self.hung:
            raise RayActorError

    async def kill(self, replica_id: str) -> None: ...


class Seen:
    """A fleet of some replicas whose router's page is looked at."""

    def __init__(self, client: Any, prompts: Prompts, replicas: int = 2) -> None:
        self.names = [f"r{number:03}" for number in range(replicas)]
        self.recent = Recent()
        self.fleet = Fleet(
            model="m", revision="", block_size=4, rng=random.Random(0), witness=self.recent
        )
        self.serving = Serving(self.names)
        index = Index(client, "seen")
        catalogue = Catalogue(Prefixes(client, "seen"), self.fleet, block_size=4)
        hot = Hottest(HotPrefixes(block_size=4), self.fleet, catalogue, prompts)
        self.view = View(
            self.recent,
            RouterSettings(model="m", served_model_name="m", redis_url="", block_size=4),
            index=index,
            fleet=self.fleet,
            feed=Feed(index, self.fleet),
            watch=Watch(lambda: self.serving, self.fleet, hang_timeout_s=5.0),
            hot=hot,
            peers=Listener(self.fleet, own="me"),
        )
        self.update()

    def update(self, pins: Mapping[str, Warm] = NO_PINS) -> None:
        self.fleet.update(
            [ReplicaRecord(name, "1", 0, FACTS, LOAD, pins=pins) for name in self.names]
        )

    def send(self, *, to: str = "r000") -> Trip:
        """A prompt of 10 tokens."""
        placement = self.fleet.place(np.arange(10, dtype=np.uint32), "", self.names, 1.0)
        return self.fleet.sent(placement, to, uuid.uuid4().hex, 1.0)

    async def look(self, kind: str) -> list[Any]:
        """All things of that kind, in order."""
        state = await self.view.look()
        return [json.loads(value) for key, value in state.items() if key.startswith(kind)]


def answer(trip: Trip, cached_tokens: int = 0) -> None:
    trip.hear(Chunk(0, "", (1,), cached_tokens, finish_reason="stop"), 1.5)
    trip.end()


@pytest.fixture
async def client(redis_url: str) -> AsyncIterator[Any]:
    async with connect(redis_url) as client:
        yield client


async def test_a_decision_tells_of_its_request_until_it_is_over(
    client: Any, prompts: Prompts
) -> None:
    seen = Seen(client, prompts)
    trip = seen.send()
    (told,) = await seen.look("decision/")
    assert (told["replica"], told["outcome"], told["ttft_s"]) == ("r000", None, None)
    answer(trip, cached_tokens=4)
    (told,) = await seen.look("decision/")
    assert (told["outcome"], told["ttft_s"], told["cached_tokens"]) == ("ok", 0.5, 4)
    assert told["ledger"] == msgspec.structs.asdict(ledger_of(hit=0, surprise=4, new=4, tail=2))
    assert {each["id"] for each in told["receipt"]["replicas"]} == {"r000", "r001"}


def ledger_of(**tokens: int) -> Ledger:
    return Ledger(**(dict.fromkeys(CAUSES, 0) | tokens))


async def test_a_request_that_found_its_replica_full_is_one_decision(
    client: Any, prompts: Prompts
) -> None:
    seen = Seen(client, prompts)
    seen.send().end("moved")
    answer(seen.send(to="r001"))
    (told,) = await seen.look("decision/")
    assert told["replica"] == "r001"
    assert seen.recent.under_way == 0


async def test_only_the_last_decisions_are_remembered(client: Any, prompts: Prompts) -> None:
    seen = Seen(client, prompts)
    for _ in range(DECISIONS + 10):
        answer(seen.send())
    told = await seen.look("decision/")
    assert [each["number"] for each in told] == list(range(11, DECISIONS + 11))
    (sums,) = await seen.look("ledger")
    assert sums["requests"] == DECISIONS + 10
    assert sums["tokens"] == msgspec.structs.asdict(ledger_of(new=8 * 60, tail=2 * 60))


async def test_a_receipt_of_a_large_fleet_has_the_best_of_it(client: Any, prompts: Prompts) -> None:
    seen = Seen(client, prompts, replicas=120)
    seen.send()
    (told,) = await seen.look("decision/")
    assert (len(told["receipt"]["replicas"]), told["of_replicas"]) == (RECEIPT_REPLICAS, 120)
    assert len(await seen.look("replica/")) == 120


async def test_a_replica_is_ready_silent_or_away(client: Any, prompts: Prompts) -> None:
    seen = Seen(client, prompts, replicas=3)
    seen.serving.names = ["r000", "r001", "new"]
    seen.serving.hung = {"r001"}
    trip = seen.send(to="r001")
    async with asyncio.TaskGroup() as tasks:
        for _ in range(DOUBTED_LOOKS):
            seen.view._watch.look(tasks)
    trip.end()
    states = {each["id"]: each["state"] for each in await seen.look("replica/")}
    assert states == {"new": "ready", "r000": "ready", "r001": "silent", "r002": "away"}


async def test_a_tile_has_what_the_index_knows(client: Any, prompts: Prompts) -> None:
    seen, index = Seen(client, prompts), Index(client, "seen")
    standing = await index.register("r000", "1", facts=FACTS, load=LOAD, lease_s=30)
    await index.change(standing, added=[Fingerprint(n) for n in range(7)], lease_s=30)
    seen.update({"a": Warm(5, True), "b": Warm(9, False)})
    answer(seen.send(), cached_tokens=4)
    first, second = await seen.look("replica/")
    assert (first["cached_blocks"], first["pinned_blocks"], first["capacity_blocks"]) == (7, 5, 100)
    assert (first["requests"], first["hit_tokens"], first["prompt_tokens"]) == (1, 4, 10)
    assert (second["cached_blocks"], second["requests"]) == (0, 0)


# Who is told of it.


async def never() -> None:
    await asyncio.Event().wait()


class Things:
    """What there is to see, and how often it was looked at."""

    def __init__(self) -> None:
        self.now: dict[str, bytes] = {}
        self.looks = 0

    async def look(self) -> State:
        self.looks += 1
        return dict(self.now)


@pytest.fixture
def live(monkeypatch: pytest.MonkeyPatch) -> tuple[Things, Live]:
    monkeypatch.setattr("router.insight.live.PERIOD_S", 0.01)
    monkeypatch.setattr("router.insight.live.FRESH_S", 0.0)
    things = Things()
    return things, Live(things.look, never)


def read(event: bytes) -> tuple[str, dict[str, Any], list[str]]:
    kind, data = event.decode().removesuffix("\n\n").split("\n")
    told = json.loads(data.removeprefix("data: "))
    return kind.removeprefix("event: "), told["changed"], told["gone"]


async def test_a_listener_is_told_all_and_then_what_changed(live: tuple[Things, Live]) -> None:
    things, page = live
    things.now = {"a": b"1", "b": b"2"}
    events = await page.listen()
    assert read(await anext(events)) == ("whole", {"a": 1, "b": 2}, [])
    things.now = {"a": b"1", "b": b"3", "c": b"4"}
    assert read(await anext(events)) == ("change", {"b": 3, "c": 4}, [])
    things.now = {"c": b"4"}
    kind, changed, gone = read(await anext(events))
    assert (kind, changed, sorted(gone)) == ("change", {}, ["a", "b"])


async def test_whoever_reads_slowly_misses_no_change(live: tuple[Things, Live]) -> None:
    things, page = live
    things.now = {"first": b"0"}
    slow, quick = await page.listen(), await page.listen()
    await anext(slow)
    for number in range(5):
        things.now = {str(number): b"0"}
        await anext(quick)
    things.now |= {"last": b"1"}
    assert read(await anext(slow)) == ("change", {"4": 0, "last": 1}, ["first"])


async def test_listeners_share_a_look_and_without_them_nobody_looks(
    live: tuple[Things, Live], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.insight.live.FRESH_S", 60.0)
    things, page = live
    assert things.looks == 0
    listening = [await page.listen() for _ in range(3)]
    for events in listening:
        await anext(events)
        await anext(events)
    assert things.looks == 1


async def test_one_listener_too_many_is_refused_until_another_leaves(
    live: tuple[Things, Live],
) -> None:
    _, page = live
    listening = [await page.listen() for _ in range(LISTENERS)]
    with pytest.raises(ApiError, match="close one") as refusal:
        await page.listen()
    assert refusal.value.status == 503
    del listening[0]
    await until(lambda: page.listeners < LISTENERS)
    await page.listen()


async def test_listeners_are_let_go_when_the_router_finishes() -> None:
    over = asyncio.Event()

    async def ends() -> None:
        await over.wait()

    page = Live(Things().look, ends)
    events = await page.listen()
    await anext(events)
    over.set()
    assert [event async for event in events] == []
    assert page.listeners == 0


# All of it, at a real cluster.


class Follower:
    """Listens to a cluster's page, and knows what the page knows."""

    def __init__(self, lines: Iterator[str]) -> None:
        self.things: dict[str, Any] = {}
        self._lines = lines

    def read(self) -> None:
        """The next event."""
        line = next(line for line in self._lines if line.startswith("data: "))
        told = json.loads(line.removeprefix("data: "))
        self.things |= told["changed"]
        for key in told["gone"]:
            del self.things[key]

    def until(self, is_true: Callable[["Follower"], object]) -> None:
        for _ in range(30):
            self.read()
            if is_true(self):
                return
        raise AssertionError(f"it did not become true: {self.things}")

    def all(self, kind: str) -> list[Any]:
        return [value for key, value in self.things.items() if key.startswith(kind)]

    def has_answers(self, count: int) -> bool:
        return bool(self.things["ledger"]["requests"] == count)


@contextmanager
def follow(cluster: Cluster) -> Iterator[Follower]:
    url = f"{cluster.url}/v1/cluster/live"
    with httpx.stream("GET", url, timeout=30) as answer:
        assert answer.status_code == 200, answer.read()
        assert answer.headers["content-type"].startswith("text/event-stream")
        yield Follower(answer.iter_lines())


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Two replicas behind one router."""
    with start_cluster("--engine", "simulated", "--simulated-decode-ms", "1") as cluster:
        yield cluster


@pytest.mark.timeout(240)
def test_requests_are_seen_with_receipts_and_a_ledger_by_all_who_listen(cluster: Cluster) -> None:
    with follow(cluster) as one, follow(cluster) as other, openai_client(cluster) as client:
        for prompt in PROMPTS * 2:
            client.completions.create(model=BUILTIN_MODEL, prompt=prompt, max_tokens=2)
        for follower in (one, other):
            follower.until(lambda each: each.has_answers(10))
        assert one.things["ledger"] == other.things["ledger"]
        decisions = one.all("decision/")
        assert [each["outcome"] for each in decisions] == ["ok"] * 10
        assert [each["prompt_tokens"] for each in decisions] == [100] * 10
        for told in decisions:
            choice, *_ = told["receipt"]["replicas"]
            assert told["receipt"]["choice"] == told["replica"] == choice["id"]
            assert sum(told["ledger"].values()) == 100
            assert told["ttft_s"] > 0
        sums = one.things["ledger"]["tokens"]
        assert sum(sums.values()) == 1000
        assert sums == {cause: sum(told["ledger"][cause] for told in decisions) for cause in CAUSES}
        assert sums["hit"] + sums["surprise"] == sum(told["cached_tokens"] for told in decisions)
        tiles = one.all("replica/")
        assert len(tiles) == 2
        assert sum(tile["prompt_tokens"] for tile in tiles) == 1000
        assert one.things["router"]["routers"] == 1


@pytest.mark.timeout(240)
def test_a_page_that_is_closed_makes_room_for_another(cluster: Cluster) -> None:
    with ExitStack() as pages:
        followers = [pages.enter_context(follow(cluster)) for _ in range(LISTENERS)]
        for follower in followers:
            follower.read()
        with httpx.stream("GET", f"{cluster.url}/v1/cluster/live", timeout=30) as refused:
            assert refused.status_code == 503
            assert "close one" in str(refused.read())
    deadline = time.monotonic() + 30
    while True:
        with httpx.stream("GET", f"{cluster.url}/v1/cluster/live", timeout=30) as answer:
            if answer.status_code == 200:
                return
        assert time.monotonic() < deadline, "no page that was closed is forgotten"
        time.sleep(0.2)
