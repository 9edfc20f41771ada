"""Placement and queue have no unit of time or tokens: fleets of any speed get the same decisions.

Factors are powers of two, by which numbers are multiplied without rounding.
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from kvroute.features import FEATURES
from kvroute.features.feature import Feature
from kvroute.prefill.speed import PrefillModel
from kvroute.replay.hardware.engine_model import EngineModel
from kvroute.replay.simulate import Cluster, Outcome, simulate
from kvroute.replay.workload.trace import Request
from tests.support.repository import ROOT
from tests.support.traces import agents, documents

FACTORS = [2.0**-7, 2.0**7]
CLUSTER = Cluster(replicas=4, kv_tokens=2**20, index_delay_s=0.01)
# Engines keep blocks for as long as clients think, which is no matter of the engines' speed.
POLICY = "kvroute-lru"


@cache
def busy(seed: int) -> Sequence[Request]:
    """Return requests of which more come than four replicas can answer at once."""
    requests = [*agents(seed, sessions=80, span_s=120.0), *documents(seed, visits=120)]
    requests.sort(key=lambda request: request.arrival_s)
    return tuple(
        replace(each, index=index, arrival_s=each.arrival_s / 4, session=None)
        for index, each in enumerate(requests[:400])
    )


@cache
def usual(seed: int, policy: str) -> Outcome:
    """Return what comes of the busy requests in the usual cluster."""
    return simulate(busy(seed), CLUSTER, policy)


def slower(cluster: Cluster, factor: float) -> Cluster:
    return replace(
        cluster,
        engine=cluster.engine.at_speed(1.0 / factor),
        index_delay_s=factor * cluster.index_delay_s,
    )


@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("seed", [0, 1])
def test_a_slower_engine_under_slower_requests_gets_the_same_decisions(
    factor: float, seed: int
) -> None:
    before = usual(seed, POLICY)
    late = [replace(request, arrival_s=factor * request.arrival_s) for request in busy(seed)]
    found = simulate(late, slower(CLUSTER, factor), POLICY)
    assert found.hit_tokens == before.hit_tokens
    assert np.array(found.first_token_s) == pytest.approx(factor * np.array(before.first_token_s))


def test_larger_prompts_in_larger_blocks_and_caches_get_the_same_decisions() -> None:
    requests, factor = busy(0), 2**7
    engine, prefill = CLUSTER.engine, CLUSTER.engine.prefill
    larger = replace(
        CLUSTER,
        kv_tokens=factor * CLUSTER.kv_tokens,
        engine=replace(
            engine,
            prefill=PrefillModel(factor * prefill.tokens_per_s, factor * prefill.attention_tokens),
            chunk_tokens=factor * engine.chunk_tokens,
            context_token_s=0.0,
        ),
    )
    plain = replace(CLUSTER, engine=replace(engine, context_token_s=0.0))
    before = simulate(_even(requests, 1), plain, POLICY)
    found = simulate(_even(requests, factor), larger, POLICY)
    assert [tokens // factor for tokens in found.hit_tokens] == before.hit_tokens
    assert np.array(found.first_token_s) == pytest.approx(np.array(before.first_token_s))


def _even(requests: Sequence[Request], factor: int) -> list[Request]:
    """Return requests whose answers are one token, so that only prompts take memory."""
    return [
        replace(
            request,
            input_tokens=factor * request.input_tokens,
            output_tokens=1,
            block_tokens=factor * request.block_tokens,
        )
        for request in requests
    ]


def p90_s(outcome: Outcome) -> float:
    waits_s = np.array(outcome.first_token_s) - np.array(outcome.arrival_s)
    return float(np.percentile(waits_s, 90))


@pytest.mark.parametrize("more", [replace(CLUSTER, replicas=5), replace(CLUSTER, kv_tokens=2**21)])
@pytest.mark.parametrize("seed", [0, 1])
def test_one_more_replica_or_more_cache_makes_no_request_clearly_later(
    more: Cluster, seed: int
) -> None:
    before_s = p90_s(usual(seed, "kvroute"))
    assert p90_s(simulate(busy(seed), more, "kvroute")) <= 1.05 * before_s


def test_the_modelled_engine_itself_has_no_unit() -> None:
    model = EngineModel()
    assert model.at_speed(0.5).alone_s(0, 1000, 10) == 2.0 * model.alone_s(0, 1000, 10)


DECIDING = ("router/placement",)  # packages that decide where and when
REPORT = re.compile("_(metrics|checks|options)$")  # modules of features that decide nothing
REPORTING = ("kvroute/autoscaling.py", "replica/backlog.py")
SECONDS = re.compile(r"^((?:[A-Z_]+_S, )*[A-Z_]+_S)\b.* = ", flags=re.MULTILINE)


def test_each_absolute_time_that_decides_has_its_reason_in_the_documents() -> None:
    files = [
        *map(Path, REPORTING),
        *(file for name in DECIDING for file in (ROOT / name).glob("*.py")),
        *(
            file
            for feature in FEATURES
            for file in (ROOT / "kvroute/features" / feature.name).glob("*.py")
            if type(feature).replayed is not Feature.replayed and not REPORT.search(file.stem)
        ),
    ]
    constants = {
        name
        for file in files
        for names in SECONDS.findall((ROOT / file).read_text())
        for name in names.split(", ")
    }
    assert len(constants) > 5
    page = (ROOT / "docs" / "queue.md").read_text()
    assert [name for name in sorted(constants) if f"`{name}`" not in page] == []
