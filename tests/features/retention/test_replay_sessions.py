"""Retention in a replay: prompts that return stay cached, and clients' hints about ends."""

import random
from collections.abc import Iterator
from itertools import count

from kvroute.blocks.fingerprint import Fingerprint
from kvroute.replay.simulate import Cluster, simulate
from kvroute.replay.workload.session_ends import Ends, with_ends
from kvroute.replay.workload.trace import BLOCK_TOKENS, Request

CHATS = 12
PAUSE_S = 20.0
CLUSTER = Cluster(replicas=2, kv_tokens=60 * BLOCK_TOKENS)


def chats_beside_a_batch_job(seed: int, *, prompts: int = 500) -> list[Request]:
    """Return chats beside a batch job of this number of prompts."""
    rng, fresh = random.Random(seed), count(1)
    requests = []
    for chat in range(CHATS):
        blocks, at_s = blocks_of(fresh, 2), rng.uniform(0, PAUSE_S)
        for _ in range(12):
            requests.append(request(at_s, blocks, str(chat)))
            blocks, at_s = [*blocks, *blocks_of(fresh, 1)], at_s + PAUSE_S
    for _ in range(prompts):
        requests.append(request(rng.uniform(0, 250), blocks_of(fresh, 4), None))
    requests.sort(key=lambda each: each.arrival_s)
    return [
        Request(i, r.arrival_s, r.input_tokens, 20, r.blocks, session=r.session)
        for i, r in enumerate(requests)
    ]


def blocks_of(fresh: Iterator[int], number: int) -> list[Fingerprint]:
    return [Fingerprint(next(fresh)) for _ in range(number)]


def request(at_s: float, blocks: list[Fingerprint], session: str | None) -> Request:
    return Request(0, at_s, len(blocks) * BLOCK_TOKENS + 50, 20, tuple(blocks), session=session)


def hit_tokens(requests: list[Request], policy: str = "kvroute") -> int:
    return sum(simulate(requests, CLUSTER, policy).hit_tokens)


def test_chats_stay_cached_beside_a_batch_job_unlike_with_lru() -> None:
    requests = chats_beside_a_batch_job(1)
    learned = hit_tokens(requests)
    told = hit_tokens(with_ends(requests, Ends(right=1.0), seed=1))
    assert hit_tokens(requests, "kvroute-lru") < learned < told


def test_mostly_wrong_ends_are_ignored() -> None:
    """Each turn has the hint that its session ends, and most sessions continue."""
    requests = chats_beside_a_batch_job(2, prompts=0)
    wrong = hit_tokens(with_ends(requests, Ends(right=1.0, wrong=1.0), seed=1))
    assert wrong > 0.9 * hit_tokens(requests)


def test_the_shares_of_requests_have_the_hint() -> None:
    requests = chats_beside_a_batch_job(3)
    last = {r.session: r.index for r in requests if r.session}.values()
    ends = set(last) | {r.index for r in requests if not r.session}
    told = with_ends(requests, Ends(right=1.0), seed=0)
    assert {r.index for r in told if r.is_end} == ends
    half = with_ends(requests, Ends(right=0.5, wrong=0.5), seed=0)
    assert 0.3 < sum(r.is_end for r in half) / len(half) < 0.7
    assert with_ends(requests, Ends(), seed=0) == requests
