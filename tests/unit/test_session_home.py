"""A session's id says where its blocks may be; it binds to no replica."""

import random
import time

import numpy as np

from kvroute.contract.generation import TokenIds
from kvroute.router.placement.attempts import RequestContext
from kvroute.router.placement.fleet import Fleet
from kvroute.router.sessions.returns import Said

NAMED = Said(session=7)
REPLICAS = ["a", "b", "c", "d"]


class Router:
    def __init__(self, seed: int) -> None:
        self.fleet = Fleet(model="m", revision="", block_size=32, rng=random.Random(seed))

    def choose(self, token_ids: TokenIds, session: int) -> str:
        now_s = time.monotonic()
        placement = self.fleet.place(token_ids, REPLICAS, now_s, session=session)
        return placement.ranking[0].replica_id

    def send(self, token_ids: TokenIds, replica_id: str, said: Said, *, ends: bool = True) -> None:
        now_s = time.monotonic()
        placement = self.fleet.place(token_ids, REPLICAS, now_s)
        context = RequestContext(now_s, retention=self.fleet.retention(placement, said))
        attempt = self.fleet.sent(placement, replica_id, str(random.random()), now_s, context)
        if ends:
            attempt.end("ok")


def prompt(number: int, tokens: int = 400) -> TokenIds:
    return np.arange(number * 100_000, number * 100_000 + tokens, dtype=np.uint32)


def test_what_the_index_does_not_know_of_goes_where_its_session_was() -> None:
    for seed, home in enumerate(REPLICAS * 5):
        router = Router(seed)
        router.send(prompt(1), home, NAMED)
        assert router.choose(prompt(2), 7) == home


def test_another_session_does_not() -> None:
    chosen = set()
    for seed in range(20):
        router = Router(seed)
        router.send(prompt(1), "b", NAMED)
        chosen.add(router.choose(prompt(2), 8))
    assert len(chosen) > 1


def test_a_busy_replica_loses_the_session() -> None:
    router = Router(0)
    router.send(prompt(1), "b", NAMED)
    router.send(prompt(3, 50_000), "b", Said(), ends=False)
    assert router.choose(prompt(2), 7) != "b"
