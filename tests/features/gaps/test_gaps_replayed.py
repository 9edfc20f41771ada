"""A replay of engines that limit the time between tokens."""

from dataclasses import replace

from kvroute.features.gaps import LIMITS
from kvroute.prefill.speed import PrefillModel
from kvroute.replay.hardware.engine_model import EngineModel
from kvroute.replay.simulate import Cluster, Outcome, simulate
from tests.support.conversations import conversations, request

SLOW = EngineModel(PrefillModel(tokens_per_s=40_000.0, attention_tokens=30_000.0), step_s=0.01)
CLUSTER = Cluster(2, 80_000, engine=SLOW)
REQUESTS = conversations(30)


def limited(milliseconds: str) -> Outcome:
    return simulate(REQUESTS, replace(CLUSTER, environment={LIMITS: milliseconds}), "kvroute")


def test_gaps_are_shorter_and_every_answer_ends() -> None:
    today, steady = simulate(REQUESTS, CLUSTER, "kvroute"), limited("40 2000")
    (before_s,), (after_s,) = (each.gaps.percentiles_s(0.99) for each in (today, steady))
    assert before_s > 0.08
    assert after_s < 0.042
    assert all(steady.finished_s)
    # What is computed is the same, but for hits that depend on the times.
    assert sum(steady.hit_tokens) > 0.95 * sum(today.hit_tokens)


def test_an_empty_limit_changes_nothing() -> None:
    assert limited("") == simulate(REQUESTS, CLUSTER, "kvroute")


def test_a_prompt_alone_is_not_slower() -> None:
    alone = [request(0, [*range(1, 40)], 1, rest=7)]
    today = simulate(alone, CLUSTER, "kvroute")
    steady = simulate(alone, replace(CLUSTER, environment={LIMITS: "5 100"}), "kvroute")
    assert steady.first_token_s == today.first_token_s
