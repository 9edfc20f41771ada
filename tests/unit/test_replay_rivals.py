"""The models of other routers' policies decide as their sources do."""

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from kvroute.blocks.fingerprint import Fingerprint
from kvroute.blocks.tiers import HOST
from kvroute.contract.records import Load, TierFacts
from kvroute.prefill.speed import PrefillModel
from kvroute.replay.policies.dynamo import Dynamo, DynamoShortestFirst
from kvroute.replay.policies.llm_d import LlmD, LlmDBlend, LlmDBlendSpeculative, LlmDRequests
from kvroute.replay.policies.policy_protocol import LoadReport, Policy, Setup
from kvroute.replay.policies.rivals import Indexed, LMetric, StickyLeastLoaded
from kvroute.replay.workload.trace import BLOCK_TOKENS, Request

SETUP = Setup(2, 800_000, PrefillModel(25_000.0, 32_768.0), BLOCK_TOKENS, chunk_tokens=1000)
BUSY_TOKENS = 16_001  # more than 16 steps of 1000


def prompt(index: int, tokens: int, blocks: Sequence[int] = ()) -> Request:
    return Request(index, 0.0, tokens, 1, tuple(Fingerprint(block) for block in blocks))


def sent(policy: Policy, *requests: Request, now_s: float = 0.0) -> list[tuple[int, int]]:
    """Return the index and the replica of each request that is sent when these have arrived."""
    for request in requests:
        policy.on_arrival(request, now_s)
    return [(send.request.index, send.replica) for send in policy.take_decisions(now_s)]


def both_busy(policy: Policy) -> tuple[Request, Request]:
    """Return two requests that fill the two replicas."""
    long = prompt(0, BUSY_TOKENS), prompt(1, BUSY_TOKENS)
    assert sorted(replica for _, replica in sent(policy, *long)) == [0, 1]
    return long


def test_dynamo_holds_requests_while_every_replica_has_too_many_tokens_to_compute() -> None:
    policy = Dynamo(SETUP, random.Random(0))
    first, _ = both_busy(policy)
    assert sent(policy, prompt(2, 9000), prompt(3, 10)) == []
    free = policy.replica_of[first.index]
    policy.on_first_token(first, 1.0)
    assert sent(policy, now_s=1.0) == [(2, free), (3, free)]


def test_dynamo_sends_while_one_replica_is_at_the_threshold_exactly() -> None:
    policy = Dynamo(SETUP, random.Random(0))
    sent(policy, prompt(0, BUSY_TOKENS), prompt(1, BUSY_TOKENS - 1))
    assert len(sent(policy, prompt(2, 10))) == 1
    assert sent(policy, prompt(3, 10)) == []


def test_cached_tokens_do_not_fill_dynamos_replicas() -> None:
    policy = Dynamo(SETUP, random.Random(0))
    chain = list(range(1, 33))
    policy.on_index_change(0, [Fingerprint(block) for block in chain], [])
    policy.on_index_change(1, [Fingerprint(block) for block in chain], [])
    requests = [prompt(n, 32 * BLOCK_TOKENS + 1, chain) for n in range(6)]
    assert len(sent(policy, *requests)) == 6


def test_dynamos_wspt_lets_the_fewest_uncached_tokens_go_first() -> None:
    policy = DynamoShortestFirst(SETUP, random.Random(0))
    first, _ = both_busy(policy)
    policy.on_index_change(0, [Fingerprint(block) for block in range(1, 11)], [])
    cached = prompt(4, 10 * BLOCK_TOKENS + 5, range(1, 11))
    assert sent(policy, prompt(2, 900), prompt(3, 10), cached) == []
    policy.on_first_token(first, 1.0)
    assert [index for index, _ in sent(policy, now_s=1.0)] == [4, 3, 2]


def test_lmetric_multiplies_tokens_to_compute_with_requests() -> None:
    policy = LMetric(SETUP, random.Random(0))
    policy.on_index_change(0, [Fingerprint(block) for block in range(1, 5)], [])

    def chosen(index: int) -> int:
        return sent(policy, prompt(index, 4 * BLOCK_TOKENS + 500, range(1, 5)))[0][1]

    assert chosen(0) == 0  # 500 x 1 against 2548 x 1
    assert chosen(1) == 0  # 1000 x 2
    assert chosen(2) == 1  # 1500 x 3


def test_lmetric_expects_prompts_where_it_sent_them_until_they_are_answered() -> None:
    policy = LMetric(SETUP, random.Random(0))
    request = prompt(0, 4 * BLOCK_TOKENS + 1, range(1, 5))
    sent(policy, request)
    assert sorted(policy.hits(request)) == [0, 4]
    policy.on_first_token(request, 1.0)
    policy.on_finish(request, 0.0)
    assert policy.hits(request) == [0, 0]


def test_llm_ds_blend_spreads_equal_prompts_unless_it_speculates() -> None:
    def homes(policy: Policy) -> set[int]:
        chains = [prompt(n, 4 * BLOCK_TOKENS, range(1, 5)) for n in range(2)]
        return {replica for request in chains for _, replica in sent(policy, request)}

    assert homes(LlmDBlend(SETUP, random.Random(0))) == {0, 1}
    assert len(homes(LlmDBlendSpeculative(SETUP, random.Random(0)))) == 1


def test_llm_ds_speculation_ends_after_two_seconds() -> None:
    policy = LlmDBlendSpeculative(SETUP, random.Random(0))
    request = prompt(0, 4 * BLOCK_TOKENS, range(1, 5))
    sent(policy, request)
    sent(policy, now_s=1.9)
    assert max(policy.hits(request)) == 3
    sent(policy, now_s=2.0)
    assert policy.hits(request) == [0, 0]


@pytest.mark.parametrize(("kind", "credit"), [(LMetric, 1.0), (LlmDBlend, 0.8), (Dynamo, 0.75)])
def test_a_block_in_host_memory_has_its_products_weight(kind: type[Indexed], credit: float) -> None:
    policy = kind(replace(SETUP, tiers={HOST: TierFacts(100, 1, 1.0)}), random.Random(0))
    chain = [Fingerprint(block) for block in range(1, 5)]
    policy.on_index_change(0, [*chain[:1], *map(HOST.fingerprint, chain)], [])
    assert policy.hits(prompt(0, 4 * BLOCK_TOKENS + 1, range(1, 5))) == [1 + 3 * credit, 0]


@pytest.mark.parametrize("busy", [0, 1])
def test_llm_ds_blend_uses_the_replicas_reports(busy: int) -> None:
    policy = LlmDBlend(SETUP, random.Random(0))
    idle, loaded = LoadReport(Load(), 0), LoadReport(Load(waiting=3, used_blocks=900), 5000)
    policy.on_reports([loaded, idle] if busy == 0 else [idle, loaded], 0.0)
    assert [replica for _, replica in sent(policy, *(prompt(n, 10) for n in range(5)))] == [
        1 - busy
    ] * 5


def test_llm_d_keeps_to_a_replica_with_most_of_the_prompt_until_it_would_take_18_s_longer() -> None:
    policy = LlmD(SETUP, random.Random(0))
    chain = [*range(1, 11)]
    policy.on_index_change(0, [Fingerprint(block) for block in chain[:9]], [])
    known = prompt(0, 10 * BLOCK_TOKENS, chain)
    assert policy.penalty_tokens == pytest.approx(18.0 * 25_000, rel=0.03)
    policy.prefill_tokens = [policy.penalty_tokens, 0]
    assert policy.pick(known) == 0
    policy.prefill_tokens = [policy.penalty_tokens + 1, 0]
    assert policy.pick(known) == 1
    policy.prefill_tokens = [1.0, 0]
    assert policy.pick(prompt(1, 20 * BLOCK_TOKENS, [*chain, *range(100, 110)])) == 0  # 9 of 20
    policy.prefill_tokens = [20.0 * BLOCK_TOKENS, 0]
    assert policy.pick(prompt(1, 20 * BLOCK_TOKENS, [*chain, *range(100, 110)])) == 1


def test_llm_d_requests_takes_the_fewest_requests_of_those_with_most_of_the_prompt() -> None:
    policy = LlmDRequests(SETUP, random.Random(0))
    policy.on_index_change(0, [Fingerprint(1)], [])
    policy.active = [3, 0]
    assert policy.pick(prompt(0, BLOCK_TOKENS + 1, [1])) == 0
    policy.on_index_change(1, [Fingerprint(1)], [])
    assert policy.pick(prompt(0, BLOCK_TOKENS + 1, [1])) == 1


def test_a_sticky_session_stays_where_the_fewest_sessions_were() -> None:
    policy = StickyLeastLoaded(SETUP, random.Random(0))
    turns = [replace(prompt(n, 10), session=name, is_end=n == 3) for n, name in enumerate("abcabd")]
    homes = [policy.choose(turn) for turn in turns[:5]]
    assert homes[:2] == homes[3:5]
    assert sorted(homes[:2]) == [0, 1]
    policy.on_finish(turns[3], 1.0)  # a's end
    assert policy.sessions[homes[0]] == int(homes[2] == homes[0])
