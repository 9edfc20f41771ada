"""The fleet is as large as its load needs: what replicas report, and what is made of it."""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from ray.serve._private.autoscaling_state import _apply_autoscaling_config
from ray.serve._private.common import DeploymentID, ReplicaID
from ray.serve._private.deployment_scheduler import (
    DeploymentScheduler,
    SpreadDeploymentSchedulingPolicy,
)
from ray.serve.config import AutoscalingConfig, AutoscalingContext

from kvroute import autoscaling
from kvroute.app import GROW_DELAY_S, build
from kvroute.autoscaling import Report, WaitPolicy, desired_replicas, queueing_s
from kvroute.blocks.fingerprint import Fingerprint
from kvroute.contract.records import Description, ReplicaRecord
from kvroute.controller.replica_count import ReplicaCounts, ScaleError, check_not_autoscaling
from kvroute.replica.backlog import STEP_S, Backlog, occupancy
from kvroute.replica.engine.kv_events import BlockRemoved, BlockStored
from kvroute.replica.engine_metrics import ReplicaMetrics
from kvroute.replica.ghosts import HALF_LIFE_S, Ghosts, MissedShare
from kvroute.replica.rank import Rank, autoscaling_stats
from kvroute.replica.sim_engine.config import SimulatedConfig
from kvroute.replica.sim_engine.simulated import SimulatedEngine
from kvroute.router.placement.attempts import Attempt
from kvroute.router.placement.fleet import Fleet
from kvroute.settings.help import SettingsError
from kvroute.settings.serve import load
from kvroute.store.connection import connect
from kvroute.store.index import Index
from tests.support.metrics_table import NOWHERE
from tests.support.records import FACTS, LOAD
from tests.support.serving import Cluster

IDLE = Report(wait_s=0.0, service_s=0.1, occupancy=0.0)
TARGET_S = 1.0


def desired(*reports: Report, running: int = 0, target: int = 0, has_queue: bool = False) -> int:
    running = running or len(reports)
    return desired_replicas(
        reports,
        running=running,
        target=target or running,
        target_wait_s=TARGET_S,
        has_queue=has_queue,
    )


def waiting(wait_s: float) -> Report:
    return Report(wait_s, service_s=0.1, occupancy=1.0)


def taken(share: float) -> Report:
    return Report(0.0, service_s=0.1, occupancy=share)


# What a replica reports.


def test_a_new_request_waits_for_all_pending_prefill() -> None:
    backlog = Backlog(prefill_tokens_per_s=1000.0)
    backlog.add("a", 1000, now_s=0.0)
    backlog.add("b", 500, now_s=0.0)
    assert backlog.wait_s(0.0) == pytest.approx(1.5 + 2 * STEP_S)
    assert backlog.wait_s(0.5) == pytest.approx(1.0 + 2 * STEP_S)


def test_a_request_stops_delaying_others_with_its_first_token_or_its_end() -> None:
    backlog = Backlog(prefill_tokens_per_s=1000.0)
    backlog.add("a", 1000, now_s=0.0)
    backlog.add("b", 1000, now_s=0.0)
    backlog.first_token("a", 1.0)
    backlog.remove("b", 1.0)
    backlog.remove("a", 2.0)
    assert backlog.wait_s(2.0) == 0.0


def test_the_real_speed_is_learned_from_first_tokens() -> None:
    backlog = Backlog(prefill_tokens_per_s=1000.0)
    for number in range(200):
        backlog.add(str(number), 1000, now_s=3.0 * number)
        backlog.first_token(str(number), 3.0 * number + 3.0)
    assert backlog.service_s() == pytest.approx(3.0, rel=0.05)
    backlog.add("next", 1000, now_s=600.0)
    assert backlog.wait_s(600.0) == pytest.approx(3.0, rel=0.05)


def test_an_overdue_first_token_already_counts_as_slowness() -> None:
    """This happens, for example, while long answers take every place in the batch."""
    backlog = Backlog(prefill_tokens_per_s=1000.0)
    for number in range(11):
        backlog.add(str(number), 100, now_s=0.0)
    assert backlog.wait_s(0.1) < 2.0
    assert backlog.wait_s(20.0) > 20.0


def test_a_new_requests_wait_includes_the_wait_in_routers() -> None:
    backlog = Backlog(prefill_tokens_per_s=1000.0)
    for number, waited_s in enumerate([0.0, 10.0, 20.0]):
        backlog.add(str(number), 0, now_s=100.0, waited_s=waited_s)
        backlog.first_token(str(number), 100.0)
    assert backlog.wait_s(100.0) == pytest.approx(10.0)
    assert backlog.wait_s(200.0) < 0.01  # no more requests arrive


@pytest.mark.parametrize("target_s", [1.0, 5.0])
def test_a_fleet_grows_if_requests_wait_in_the_routers(target_s: float) -> None:
    """The replicas' own backlogs are short then, because routers hold the requests."""
    backlog = Backlog(prefill_tokens_per_s=1000.0)
    for second in range(20):
        backlog.add(str(second), 1000, now_s=float(second), waited_s=8.0)
        if second >= 1:
            backlog.first_token(str(second - 1), float(second))
    reports = [waiting(backlog.wait_s(20.0))] * 4
    wanted = desired_replicas(reports, running=4, target=4, target_wait_s=target_s, has_queue=False)
    assert wanted > 4


def test_the_busy_share_decays_within_seconds() -> None:
    backlog = Backlog(prefill_tokens_per_s=1000.0)
    backlog.add("a", 1000, now_s=100.0)
    assert backlog.busy_share(200.0) == pytest.approx(1.0, abs=0.01)
    backlog.first_token("a", 200.0)
    assert backlog.busy_share(300.0) == pytest.approx(0.0, abs=0.01)


def idle_rank() -> Rank:
    engine, redis = SimulatedEngine(SimulatedConfig()), connect(NOWHERE)
    return Rank(
        *(engine, Index(redis, "m"), ReplicaMetrics(CollectorRegistry()), None),
        rank_id="r",
        description=Description(engine.facts),
        lease_s=3.0,
        reports=dict,
    )


async def test_a_replicas_wait_is_that_of_its_less_busy_rank() -> None:
    ranks = [idle_rank() for _ in range(4)]
    ranks[0].backlog.add("a", 10_000, now_s=0.0)
    ranks[1].backlog.add("b", 30_000, now_s=0.0)
    report = autoscaling_stats(ranks, 0.0)
    assert report["wait_s"] == 0.0
    assert report["service_s"] == pytest.approx((1.0 + 3.0 + 2 * STEP_S) / 4)
    later = autoscaling_stats(ranks, 100.0)
    assert later["occupancy"] == pytest.approx(0.5, abs=0.01)
    assert autoscaling_stats(ranks[:2], 0.0)["wait_s"] == pytest.approx(1.0 + STEP_S)


def test_the_missed_share_is_what_a_larger_cache_would_have_had() -> None:
    ghosts = Ghosts(capacity_blocks=4, block_tokens=10)
    missed = MissedShare(ghosts)
    assert missed.share(0.0) == 0.0
    ghosts.record_events([BlockStored([1], [Fingerprint(1)]), BlockRemoved([1])])
    missed.record_computed(30)
    assert missed.share(2.0) == 0.0
    ghosts.record_events([BlockStored([1], [Fingerprint(1)])])
    missed.record_computed(10)
    assert missed.share(4.0) == pytest.approx(10 / 40, rel=0.01)
    missed.record_computed(40)
    assert missed.share(4.0 + HALF_LIFE_S) == pytest.approx(5 / 60, rel=0.02)


def test_occupancy_is_the_use_of_the_scarcest_resource() -> None:
    assert occupancy(0.1, 64, 128, 10, 1000) == 0.5
    assert occupancy(0.1, 64, 128, 900, 1000) == 0.9
    assert occupancy(0.7, 64, 128, 10, 1000) == 0.7
    assert occupancy(0.1, 64, 0, -10, 0) == 0.1


# The decision about the number of replicas.


def test_a_fleet_that_keeps_newcomers_waiting_grows_by_how_long_and_doubles_at_most() -> None:
    assert desired(*[waiting(1.0)] * 4) == 4
    assert desired(*[waiting(1.1)] * 4) == 5
    assert desired(*[waiting(1.5)] * 4) == 6
    assert desired(*[waiting(60.0)] * 4) == 8


def test_a_queue_that_cannot_move_calls_for_nobody_while_newcomers_find_empty_replicas() -> None:
    assert desired(waiting(30.0), waiting(30.0), IDLE, IDLE, target=4) == 4
    assert desired(waiting(30.0), waiting(30.0), running=4) == 4


def test_starting_replicas_are_not_requested_again() -> None:
    assert desired(waiting(60.0), waiting(60.0), target=4) == 4


def test_refusals_by_all_replicas_add_a_replica() -> None:
    assert desired(taken(0.1), taken(0.1), has_queue=True) == 3


def test_replicas_are_removed_one_at_a_time_and_only_if_the_others_have_capacity() -> None:
    assert desired(*[taken(0.1)] * 4) == 3
    assert desired(*[taken(0.4)] * 4) == 3
    assert desired(*[taken(0.5)] * 4) == 4
    assert desired(IDLE) == 1


def test_no_replica_is_removed_if_new_requests_would_then_wait() -> None:
    """One replica that computes long prompts for half of its time has a queue."""
    slow = Report(0.0, service_s=4.0, occupancy=0.25)
    assert desired(slow, slow) == 2
    assert desired(*[slow] * 8) == 7


def test_no_replica_is_removed_if_the_loss_of_its_cache_costs_too_much() -> None:
    """A quarter more cache would save 30% of the work: a fourth less costs as much."""
    tight = Report(0.0, service_s=0.1, occupancy=0.4, missed=0.3)
    assert desired(*[taken(0.4)] * 4) == 3
    assert desired(*[tight] * 4) == 4
    assert desired(*[tight] * 32) == 31


def test_no_replica_is_removed_before_all_have_reported() -> None:
    assert desired(IDLE, IDLE, running=3) == 3


@given(
    st.lists(st.tuples(st.floats(0, 100), st.floats(0, 10), st.floats(0, 1)), max_size=16),
    st.integers(0, 16),
    st.integers(1, 32),
    st.booleans(),
)
def test_the_new_target_is_near_the_running_or_starting_replicas(
    reports: list[tuple[float, float, float]], silent: int, target: int, has_queue: bool
) -> None:
    running = len(reports) + silent
    wanted = desired(
        *(Report(*report) for report in reports),
        running=running,
        target=target,
        has_queue=has_queue,
    )
    assert max(1, target - 1) <= wanted <= max(target, 2 * running, running + 1)


@given(st.integers(1, 64), st.floats(0.01, 0.9), st.floats(0.01, 10))
def test_a_queue_gets_shorter_with_every_replica_that_shares_it(
    servers: int, share: float, service_s: float
) -> None:
    assert queueing_s(1, share, service_s) == pytest.approx(service_s * share / (1 - share))
    assert queueing_s(servers + 1, share, service_s) < queueing_s(servers, share, service_s)


# Over time: the policy as Serve runs it, on a fleet of queues.


@dataclass
class SimulatedFleet:
    """Replicas that compute one second of prefill a second; load in replicas, by time."""

    load: Callable[[float], float]
    least: int
    most: int
    shrink_delay_s: float = 120.0
    start_s: float = 30.0  # an engine's
    seed: int = 0
    sizes: list[int] = field(default_factory=list)  # target, each second
    waits_s: list[float] = field(default_factory=list)  # a new request's, each second

    def run(self, seconds: int, monkeypatch: pytest.MonkeyPatch) -> None:
        now_s = 0.0
        monkeypatch.setattr("ray.serve.autoscaling_policy.time.time", lambda: now_s)
        config = AutoscalingConfig(
            min_replicas=self.least,
            max_replicas=self.most,
            upscale_delay_s=GROW_DELAY_S,
            downscale_delay_s=self.shrink_delay_s,
        )
        policy, state = _apply_autoscaling_config(WaitPolicy(TARGET_S)), dict[str, Any]()
        rng = random.Random(self.seed)
        replicas = [Queue(ready_s=0.0) for _ in range(self.least)]
        grown_s: float | None = None
        for second in range(seconds):
            now_s = float(second)
            running = [replica for replica in replicas if replica.ready_s <= now_s]
            for _ in range(poisson(rng, 4 * self.load(now_s))):  # prompts of a quarter of a second
                min(running, key=lambda each: each.queue_s).queue_s += 0.25
            self.waits_s.append(min(each.queue_s for each in running))
            for each in running:
                each.work()
            target = len(replicas)
            if second % autoscaling.SAMPLE_S:  # no news
                self.sizes.append(target)
                continue
            wanted, state = policy(context(running, target, now_s, grown_s, config, state))
            wanted = max(self.least, min(self.most, wanted))
            grown_s = now_s if wanted > target else grown_s
            replicas += [Queue(now_s + self.start_s) for _ in range(wanted - target)]
            del replicas[wanted:]  # the newest
            self.sizes.append(wanted)


@dataclass
class Queue:
    ready_s: float
    queue_s: float = 0.0
    waits_s: list[float] = field(default_factory=list)
    busy_s: list[float] = field(default_factory=list)

    def work(self) -> None:
        """One second passes."""
        self.waits_s.append(self.queue_s)
        self.busy_s.append(min(1.0, self.queue_s))
        self.queue_s = max(0.0, self.queue_s - 1.0)


@dataclass(frozen=True)
class Sample:
    value: float


def context(
    running: list[Queue],
    target: int,
    now_s: float,
    grown_s: float | None,
    config: AutoscalingConfig,
    state: dict[str, Any],
) -> AutoscalingContext:
    def samples(values: list[float]) -> list[Sample]:
        kept = values[-int(autoscaling.LOOK_BACK_S) :]
        return [Sample(value) for value in kept[:: int(autoscaling.SAMPLE_S)]]

    metrics = {
        "wait_s": {number: samples(each.waits_s) for number, each in enumerate(running)},
        "service_s": {number: [Sample(0.25)] for number in range(len(running))},
        "occupancy": {number: samples(each.busy_s) for number, each in enumerate(running)},
        "refusing": {number: [Sample(0.0)] for number in range(len(running))},
    }
    empty: dict[str, Any] = dict.fromkeys(
        (
            "deployment_id",
            "deployment_name",
            "app_name",
            "aggregated_metrics",
            "last_scale_down_time",
        )
    )
    return AutoscalingContext(
        **empty,
        current_num_replicas=len(running),
        target_num_replicas=target,
        running_replicas=[],
        total_num_requests=0.0,
        total_queued_requests=0.0,
        raw_metrics=metrics,
        capacity_adjusted_min_replicas=config.min_replicas,
        capacity_adjusted_max_replicas=config.max_replicas,
        policy_state=state,
        last_scale_up_time=grown_s,
        current_time=now_s,
        config=config,
    )


def poisson(rng: random.Random, mean: float) -> int:
    """Arrivals in a second."""
    count, at = 0, rng.expovariate(mean) if mean else 1.0
    while at < 1.0:
        count, at = count + 1, at + rng.expovariate(mean)
    return count


@pytest.mark.parametrize("seed", range(2))
def test_a_step_up_is_followed_once_and_a_step_down_slowly(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = SimulatedFleet(lambda s: 3.0 if 300 <= s < 1500 else 0.5, least=2, most=16, seed=seed)
    fleet.run(4000, monkeypatch)
    assert set(fleet.sizes[:300]) == {2}
    assert 4 <= max(fleet.sizes[300:1500]) <= 8
    assert max(fleet.waits_s[600:1500]) < 10 * TARGET_S
    assert fleet.sizes[-1] == 2


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("load", [0.3, 0.6, 1.2, 2.0, 3.5])
def test_a_load_that_stays_the_same_finds_a_size_and_hardly_ever_leaves_it(
    load: float, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = SimulatedFleet(lambda _: load, least=1, most=16, seed=seed)
    fleet.run(4000, monkeypatch)
    settled = fleet.sizes[800:]
    assert load < settled[-1] < 3 + 2 * load
    assert sum(later > earlier for earlier, later in pairwise(settled)) <= 2


def test_a_load_that_comes_and_goes_faster_than_the_delay_does_not_move_the_fleet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fleet = SimulatedFleet(lambda s: 3.0 if s % 100 < 50 else 0.3, least=2, most=16)
    fleet.run(4000, monkeypatch)
    assert len(set(fleet.sizes[1000:])) == 1


# Those that come and those that go.


def test_a_new_replica_gets_its_share_of_the_queue_and_no_more() -> None:
    """Also where engines are five times slower than they say."""
    fleet = Fleet(model="m", revision="", block_size=4, rng=random.Random(0))

    def join(*ids: str) -> None:
        fleet.update([ReplicaRecord(id_, "1", 0, FACTS, LOAD) for id_ in ids])
        for id_ in ids:
            fleet.mirror.join(id_)

    def send(number: int, now_s: float, *ids: str) -> Attempt:
        token_ids = np.arange(number * 1000, number * 1000 + 100).astype(np.uint32)
        placement = fleet.place(token_ids, ids, now_s)
        return fleet.sent(placement, placement.ranking[0].replica_id, str(number), now_s)

    join("a", "b")
    for number in range(50):
        attempt = send(number, 2.0 * number, "a", "b")
        attempt.first_token(2.0 * number + 0.5)
        attempt.end()
    for number in range(50, 60):
        send(number, 100.0, "a", "b")
    join("a", "b", "new")
    sent = Counter(send(n, 100.0, "a", "b", "new").replica_id for n in range(60, 80))
    assert sent["new"] == pytest.approx(10, abs=3)  # of 30 that wait


@pytest.mark.parametrize(
    ("nodes", "removed"),
    [("aaa", 2), ("abc", 0), ("aab", 2), ("abb", 0), ("haa", 2), ("hha", 2)],
)
def test_serve_removes_the_newest_of_a_node_and_the_oldest_of_nodes_that_have_one_each(
    nodes: str, removed: int
) -> None:
    """Nodes of the replicas, oldest first; h is the head. ARCHITECTURE says what it costs."""
    labels: Any = SimpleNamespace(get_node_labels=lambda node: {})
    scheduler = DeploymentScheduler(labels, "h", lambda: None)
    deployment = DeploymentID("Replica", "kvroute")
    scheduler.on_deployment_created(deployment, SpreadDeploymentSchedulingPolicy())
    for number, node in enumerate(nodes):
        scheduler.on_replica_running(ReplicaID(str(number), deployment), node)
    (gone,) = scheduler._get_replicas_to_stop(deployment, 1)
    assert gone.unique_id == str(removed)


# What people say and are told.


def test_the_fleet_has_a_fixed_size_unless_it_may_grow() -> None:
    args = {"redis_url": "redis://r", "engine": "simulated"}
    assert replicas_config(args)["autoscaling_config"] is None
    found = replicas_config(args | {"max_replicas": 6, "shrink_delay_s": 7.0})
    limits = found["autoscaling_config"]
    assert (limits["min_replicas"], limits["max_replicas"]) == (2, 6)
    assert limits["downscale_delay_s"] == 7.0
    assert limits["policy"]["policy_kwargs"] == {"target_wait_s": 1.0}


def replicas_config(args: dict[str, Any]) -> dict[str, Any]:
    """Serve's, of the deployment that the routers are bound to."""
    (models,) = build(args)._bound_deployment.init_args
    ((_, (replicas,)),) = models
    config: dict[str, Any] = replicas._bound_deployment._deployment_config.model_dump()
    return config


def test_fewer_at_most_than_at_least_are_refused() -> None:
    with pytest.raises(
        SettingsError, match=r"--max-replicas is 2, below --replicas.* is 3; .* as 6"
    ):
        load({"replicas": 3, "max_replicas": 2})


def test_a_fleet_with_autoscaling_cannot_be_scaled_by_hand() -> None:
    check_not_autoscaling(ReplicaCounts(3, {}, "", {}))
    with pytest.raises(ScaleError, match=r"3 replicas now, 2 to 4 allowed.*--max-replicas"):
        check_not_autoscaling(ReplicaCounts(3, {}, "", {}, bounds=(2, 4)))


def replicas(cluster: Cluster) -> list[str]:
    """Ids of those in the index."""
    listed = httpx.get(f"{cluster.url}/v1/cluster", timeout=10).json()["replicas"]
    return [replica["id"] for replica in listed]
