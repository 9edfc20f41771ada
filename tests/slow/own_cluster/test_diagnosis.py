"""Each trouble of a fleet under mixed work has its own name: in the ledger, and by the doctor."""

import asyncio
import json
import re
import signal
import threading
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import psutil
import pytest
import redis
import yaml
from openai import OpenAI

from kvroute.local.embedded_redis import embedded_redis
from kvroute.process.builtin_model import BUILTIN_MODEL
from tests.support.chats import Chats
from tests.support.clearing import cache_clearer
from tests.support.clients import async_openai_client, openai_client
from tests.support.hits import hit_tokens
from tests.support.prometheus_server import CONFIG, Prometheus, prometheus
from tests.support.scraping import ledger
from tests.support.serving import Cluster, doctor, start_cluster
from tests.support.untested import needs
from tests.support.waiting import wait_until

pytestmark = needs("prometheus")

DOCUMENT_TOKENS = 128 * 32
LONG_TOKENS = 8000  # of a question about one
WINDOW = "10s"  # in place of the minutes that alerts look back
CHATS = 2
THINK_S = 2.0
NEW = f'sum(rate(kvroute_prompt_tokens_total{{cause="new"}}[{WINDOW}]))'
RULES = {
    rule["alert"]: rule["expr"]
    for group in yaml.safe_load((CONFIG.parent / "alerts.yml").read_text())["groups"]
    for rule in group["rules"]
}


@dataclass(frozen=True)
class Fleet:
    """Two replicas under some chats, and what a test does to them."""

    cluster: Cluster
    client: OpenAI
    prometheus: Prometheus
    redis_url: str
    clear: Callable[[str], None]

    def ask(self, document: Sequence[int], own_tokens: int = 8) -> str:
        """The replica that answered."""
        own = np.random.default_rng().integers(1000, 9000, own_tokens).tolist()
        raw = self.client.completions.with_raw_response.create(
            model=BUILTIN_MODEL, prompt=[*document, *own], max_tokens=2
        )
        return str(raw.headers["x-kvroute-replica"])

    def reusable_tokens(self, document: Sequence[int]) -> int:
        """Of the document, on the replica that has most of it, as the router knows."""
        return hit_tokens(self.cluster, prompt=[*document, 1])

    def gained(self, act: Callable[[], object]) -> Counter[str]:
        """Prompt tokens by cause, of what was asked meanwhile."""
        before = ledger(self.cluster)
        act()
        return ledger(self.cluster) - before

    @contextmanager
    def redis_paused(self) -> Iterator[None]:
        """It takes nothing in and tells nothing."""
        with redis.from_url(self.redis_url) as client:
            process = psutil.Process(client.info("server")["process_id"])
        process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            process.send_signal(signal.SIGCONT)

    def doctor_on_hits(self) -> str:
        """What the doctor says of the last minutes' prompts."""
        found = json.loads(doctor(self.cluster, "--json").stdout)
        return " ".join(check["finding"] for check in found if check["name"] == "hits")

    def firing(self) -> set[str]:
        """Alerts whose condition holds, were it looked at over seconds instead of minutes."""
        return {
            name
            for name, expr in RULES.items()
            if self.prometheus.values(re.sub(r"\[\d+m\]", f"[{WINDOW}]", expr))
        }


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    with (
        embedded_redis() as url,
        start_cluster(
            *("--engine", "simulated", "--redis-url", url, "--simulated-decode-ms", "1"),
            *("--simulated-prefill-tokens-per-s", "20000", "--replicas", "4"),
            *("--max-model-len", "16384"),
        ) as cluster,
        prometheus(cluster) as server,
        openai_client(cluster, max_retries=2) as client,  # a server may close what has been idle
        cache_clearer(cluster) as clear,
        chatting(cluster),
    ):
        yield Fleet(cluster, client, server, url, clear)


@contextmanager
def chatting(cluster: Cluster) -> Iterator[None]:
    """Some chats go on until the block ends; none of them fails."""
    ends = threading.Event()

    async def chat() -> list[Exception]:
        async with async_openai_client(cluster.url) as client:
            chats = Chats(client, CHATS, think_s=THINK_S)
            async with chats.going_on():
                await asyncio.to_thread(ends.wait)
        return chats.failures

    with ThreadPoolExecutor(1) as pool:
        failures = pool.submit(asyncio.run, chat())
        try:
            yield
        finally:
            ends.set()
        assert not failures.result()


def documents(count: int) -> list[list[int]]:
    """Of token ids that nothing else begins with."""
    rng = np.random.default_rng(uuid.uuid4().int % 2**32)
    return [rng.integers(1000, 9000, DOCUMENT_TOKENS).tolist() for _ in range(count)]


def by_replica(fleet: Fleet, known: Sequence[list[int]]) -> dict[str, list[list[int]]]:
    """The documents are cached, each where it says."""
    places = defaultdict(list)
    for document in known:
        places[fleet.ask(document)].append(document)
    wait_until(lambda: all(fleet.reusable_tokens(each) == DOCUMENT_TOKENS for each in known))
    wait_until(lambda: fleet.prometheus.values(NEW)[0] < DOCUMENT_TOKENS / 10)
    return places


def test_a_cleared_cache_is_stale_until_the_routers_know_and_then_evicted(fleet: Fleet) -> None:
    victim, lost = max(by_replica(fleet, documents(24)).items(), key=lambda place: len(place[1]))

    def ask_before_routers_know() -> None:
        with fleet.redis_paused():
            fleet.clear(victim)
            fleet.ask(lost[0])

    quiet, alerts = fleet.firing(), {"KvrouteCacheCleared", "KvrouteHitsEvicted"}
    fired = set[str]()

    def routers_know() -> bool:
        fired.update(fleet.firing())
        return not any(map(fleet.reusable_tokens, lost[1:]))

    def have_fired() -> bool:
        fired.update(fleet.firing())
        return alerts <= fired

    unaware = fleet.gained(ask_before_routers_know)
    wait_until(routers_know)
    aware = fleet.gained(lambda: [fleet.ask(each) for each in lost[1:]])
    assert unaware["stale"] >= DOCUMENT_TOKENS
    assert aware["evicted"] >= DOCUMENT_TOKENS * len(lost[1:])
    assert quiet.isdisjoint(alerts)
    wait_until(have_fired)
    assert "evicted" in fleet.doctor_on_hits()


def test_an_overloaded_replica_spills_what_it_has_cached(fleet: Fleet) -> None:
    hot = max(by_replica(fleet, documents(48)).values(), key=len)  # a dozen, or more
    with ThreadPoolExecutor(len(hot)) as pool:
        all_at_once = fleet.gained(lambda: list(pool.map(lambda d: fleet.ask(d, LONG_TOKENS), hot)))
    assert all_at_once["spilled"] >= DOCUMENT_TOKENS
    assert "were cached on a busier replica" in fleet.doctor_on_hits()
