"""The doctor reports what is wrong with a cluster and what to do about it."""

import importlib
import inspect
import pkgutil
from pathlib import Path
from typing import Any

import httpx
import pytest
from redis.exceptions import OutOfMemoryError

from kvroute import doctor
from kvroute.blocks.cache_groups import UNKNOWN_LAYOUT
from kvroute.contract.unreadable import KINDS
from kvroute.doctor import (
    cache_size,
    checks,
    clocks,
    collect,
    fleet_checks,
    load_checks,
    metrics_ports,
    wire_checks,
)
from kvroute.doctor.cache_size import CacheReading
from kvroute.doctor.checks import Check
from kvroute.doctor.collect import _Collection, collect_checks
from kvroute.doctor.metrics_ports import Probe
from kvroute.features import DOCTOR_REQUESTS, UNREADABLE
from kvroute.local.ports import free_port
from kvroute.process.clock_offset import Offset
from kvroute.process.metrics_port import Exposition
from kvroute.router.placement.ledger import CAUSES
from kvroute.store.connection import refusal
from tests.support import metrics_table

REDIS = {
    "version": "7.2.4",
    "maxmemory_policy": "noeviction",
    "maxmemory_bytes": 0,
    "used_bytes": 5_000_000,
    "answers_in_s": 0.001,
    "clock_ahead_s": [-0.001, 0.001],
}
SERVE = {"haproxy": True, "came_through_haproxy": True, "throughput_optimized": True}


def of_redis(**facts: Any) -> Check:
    (check,) = checks.redis(REDIS | facts)
    return check


def test_every_check_is_made() -> None:
    made = inspect.getsource(collect)
    names = [module.name for module in pkgutil.iter_modules(doctor.__path__)]
    assert len(names) > 7
    for short in sorted({*names} - {"collect"}):
        module = importlib.import_module(f"{doctor.__name__}.{short}")
        for name, function in inspect.getmembers(module, inspect.isfunction):
            is_check = "Check" in str(inspect.signature(function).return_annotation)
            if is_check and function.__module__ == module.__name__ and name[0] != "_":
                assert f"{short}.{name}(" in made


def test_a_redis_that_evicts_nothing_is_ok() -> None:
    assert of_redis().grade == "ok"
    assert of_redis(maxmemory_bytes=10_000_000).grade == "ok"


@pytest.mark.parametrize("policy", ["allkeys-lru", "volatile-ttl", "volatile-lru"])
def test_a_redis_that_may_evict_is_wrong(policy: str) -> None:
    check = of_redis(maxmemory_policy=policy)
    assert check.grade == "wrong"
    assert policy in check.finding
    assert "noeviction" in check.remedy


def test_a_redis_that_is_too_old_or_away_is_wrong() -> None:
    assert of_redis(version="6.0.16").grade == "wrong"
    assert of_redis(version="6.2.0").grade == "ok"
    (away,) = checks.redis({"error": "Connection refused", "is_own": False})
    assert away.grade == "wrong"
    assert "Connection refused; requests are answered meanwhile" in away.finding
    assert away.remedy.startswith("start Redis")


def test_a_redis_that_refuses_writes_for_now_is_wrong_with_the_remedy_for_its_state() -> None:
    facts = {"error": "not allowed", "refusal": refusal(OutOfMemoryError("not allowed"))}
    (full,) = checks.redis(facts)
    assert full.finding.startswith("Redis is full and refuses writes")
    assert full.remedy == "raise the maxmemory of Redis"


def test_a_user_need_not_start_the_redis_that_kvroute_serve_runs() -> None:
    (away,) = checks.redis({"error": "Connection refused", "is_own": True})
    assert "kvroute serve, which has started this Redis, starts it again" in away.remedy


def test_a_redis_that_is_nearly_full_or_slow_is_a_warning() -> None:
    assert of_redis(maxmemory_bytes=5_100_000).grade == "warning"
    assert of_redis(answers_in_s=0.2).grade == "warning"


def test_a_replica_that_runs_without_a_lease_is_wrong_and_a_late_one_a_warning() -> None:
    (well,) = checks.leases(["a", "b"], {"a": 2.9, "b": 2.1})
    (missing,) = checks.leases(["a", "b"], {"a": 2.9})
    (late,) = checks.leases(["a"], {"a": 2.9, "b": 0.2})
    assert (well.grade, missing.grade, late.grade) == ("ok", "wrong", "warning")
    assert "replica b" in missing.finding
    assert "replica b" in late.finding
    assert list(checks.leases(["a"], None)) == []


OWN = {"cluster": "one", "model": "m", "ray_address": "10.0.0.1:6379", "application": "kvroute"}


def test_another_cluster_in_the_redis_is_named_and_one_of_the_same_name_is_a_warning() -> None:
    twin = OWN | {"ray_address": "10.0.0.2:6379", "is_twin": True}
    other = OWN | {"cluster": "other", "is_twin": False}
    (alone,) = checks.clusters([{"own": OWN, "others": []}])
    (apart,) = checks.clusters([{"own": OWN, "others": [other]}])
    (mixed,) = checks.clusters([{"own": OWN, "others": [twin]}])
    assert (alone.grade, apart.grade, mixed.grade) == ("ok", "ok", "warning")
    assert "by 'other', with separate data" in apart.finding
    assert "10.0.0.2:6379" in mixed.finding
    assert "during an upgrade" in mixed.remedy
    assert "--cluster" in mixed.remedy
    assert list(checks.clusters(None)) == []


def test_items_that_could_not_be_read_lately_are_named_with_the_reason() -> None:
    last = {"model": "m", "kind": "replica", "last": "b", "reason": "it is of version 2"}
    (well,) = checks.records([])
    (over,) = checks.records([last | {"count": 9, "age_s": 600.0}])
    (fresh,) = checks.records([last | {"count": 9, "age_s": 0.5}])
    assert (well.grade, over.grade, fresh.grade) == ("ok", "ok", "warning")
    assert "replica 'b' of m cannot be read: it is of version 2" in fresh.finding
    assert checks.UNREADABLE_REMEDIES.keys() == {*KINDS, *UNREADABLE}


@pytest.mark.parametrize(
    ("changed", "grade", "text"),
    [
        ({}, "ok", "only this machine can reach"),
        ({"host": "localhost"}, "ok", "only this machine can reach"),
        ({"has_keys": True, "host": "0.0.0.0"}, "ok", "need API keys"),
        ({"host": "0.0.0.0"}, "warning", "everyone who can reach 0.0.0.0"),
        ({"host": "::"}, "warning", "everyone who can reach ::"),
        ({"host": "10.1.2.3"}, "warning", "everyone who can reach 10.1.2.3"),
        ({"host": "example.org"}, "warning", "everyone who can reach example.org"),
        ({"host": None}, "warning", "unknown: Serve's controller does not answer"),
        ({"has_keys": True, "problem": "no such file"}, "wrong", "no such file"),
    ],
)
def test_access_is_safe_with_keys_or_on_loopback(
    changed: dict[str, object], grade: str, text: str
) -> None:
    check = checks.access({"host": "127.0.0.1", "has_keys": False, "problem": ""} | changed)
    assert check.grade == grade
    assert text in check.finding


PLAIN, ENCRYPTED = {"host": "10.0.0.1", "tls": "off"}, {"host": "10.0.0.1", "tls": "made"}
ELSEWHERE = {"host": "10.0.0.2", "tls": "off"}
LOOPBACK = {"host": "127.0.0.1", "tls": "off"}
NODES = ["10.0.0.1", "10.0.0.2"]


@pytest.mark.parametrize(
    ("replicas", "nodes", "text"),
    [
        ([ENCRYPTED, ENCRYPTED | {"tls": "files"}], NODES, "use TLS"),
        ([LOOPBACK, LOOPBACK], ["127.0.0.1"], "reach replicas at 127.0.0.1, on their own"),
        ([LOOPBACK], ["10.0.0.1"], "reach replicas at 127.0.0.1, on their own"),
        ([LOOPBACK], None, "reach replicas at 127.0.0.1, on their own"),
        ([PLAIN, PLAIN], ["10.0.0.1"], "reach replicas at 10.0.0.1, on their own"),
        ([PLAIN, PLAIN], ["10.0.0.1", "10.0.0.1"], "reach replicas at 10.0.0.1, on their own"),
    ],
)
def test_connections_are_safe_with_tls_or_inside_one_machine(
    replicas: list[dict[str, str]], nodes: list[str] | None, text: str
) -> None:
    (check,) = wire_checks.encryption(by_id(replicas), nodes)
    assert (check.grade, check.remedy) == ("ok", "")
    assert text in check.finding


@pytest.mark.parametrize(
    ("replicas", "nodes", "text"),
    [
        ([PLAIN, ELSEWHERE], NODES, "to 2 of 2 replicas are not encrypted, and the cluster has"),
        ([PLAIN, ELSEWHERE], None, "nodes at 2 addresses"),
        ([PLAIN], NODES, "to 1 of 1 replica are not encrypted"),
        ([PLAIN, ENCRYPTED], NODES, "to 1 of 2 replicas are not encrypted"),
    ],
)
def test_plain_connections_between_machines_are_a_warning(
    replicas: list[dict[str, str]], nodes: list[str] | None, text: str
) -> None:
    (check,) = wire_checks.encryption(by_id(replicas), nodes)
    assert check.grade == "warning"
    assert text in check.finding
    assert "--wire-tls" in check.remedy


def test_nothing_is_said_of_connections_that_are_unknown() -> None:
    assert list(wire_checks.encryption({}, NODES)) == []
    assert list(wire_checks.encryption({"a": PLAIN}, None)) == []


def by_id(replicas: list[dict[str, str]]) -> dict[str, dict[str, str]]:
    return {f"r{number}": replica for number, replica in enumerate(replicas)}


def test_requests_that_do_not_come_through_haproxy_are_a_warning() -> None:
    assert checks.haproxy(SERVE).grade == "ok"
    off = checks.haproxy(SERVE | {"haproxy": False, "came_through_haproxy": False})
    assert "RAY_SERVE_ENABLE_HA_PROXY=1" in off.remedy
    assert checks.haproxy(SERVE | {"came_through_haproxy": False}).grade == "warning"
    assert checks.haproxy(SERVE | {"throughput_optimized": False}).grade == "warning"


WELL = {"status": "HEALTHY", "message": "", "replicas": {"RUNNING": 2}}
REPLACED = {  # the message is Ray Serve's
    "status": "UNHEALTHY",
    "message": "A replica's health check failed. This deployment will be UNHEALTHY until the "
    "replica recovers or a new deploy happens.",
    "replicas": {"RUNNING": 1, "STARTING": 1},
}


def test_a_deployment_that_serve_cannot_start_is_wrong_with_the_error() -> None:
    ill = REPLACED | {"message": "Traceback ...\nValueError: no GPU"}
    assert [check.grade for check in fleet_checks.deployments({"Replica": WELL})] == ["ok"]
    (check,) = fleet_checks.deployments({"Router": WELL, "Replica": ill})
    assert (check.grade, check.finding) == (
        "wrong",
        "a replica cannot start: ValueError: no GPU",
    )
    assert [check.grade for check in fleet_checks.deployments(None)] == ["wrong"]


def test_a_replacement_in_progress_is_a_warning_in_our_own_words() -> None:
    (check,) = fleet_checks.deployments({"Router": WELL, "Replica:m": REPLACED})
    assert (check.grade, check.finding) == (
        "warning",
        "replicas of m: 1 running, 1 starting; Ray Serve replaces one that has ended or hangs",
    )


def test_missing_replicas_are_counted_and_named() -> None:
    health = {"replicas": 2, "wanted": 2, "missing": {}}
    assert fleet_checks.cluster(health) == Check("cluster", "ok", "2 of 2 replicas are ready")
    one = health | {"replicas": 1, "missing": {"b": "lost"}}
    assert fleet_checks.cluster(one).grade == "warning"
    assert fleet_checks.cluster(one).finding == "1 of 2 replicas are ready; lost: b"
    assert fleet_checks.cluster(one | {"replicas": 0}).grade == "wrong"
    assert fleet_checks.cluster({"replicas": 1, "wanted": None}).finding == "1 replica is ready"


def test_a_lost_attached_server_is_one_finding_with_its_remedy() -> None:
    (lost,) = fleet_checks.servers({"http://a:1": "http://a:1 does not answer (refused); start it"})
    assert lost.finding == "your server http://a:1 does not answer (refused)"
    assert lost.remedy == "start it"
    (cut,) = fleet_checks.servers({"http://a:1": "http://a:1 does not have the LoRA adapters a, b"})
    assert cut.finding.endswith("does not have the LoRA adapters a, b")
    assert cut.remedy
    state = {"status": "UPDATING", "message": "", "replicas": {"RUNNING": 1, "STARTING": 1}}
    (waits,) = fleet_checks.deployments({"Replica": state}, lost_servers=1)
    assert waits.grade == "ok"
    (missing,) = fleet_checks.deployments({"Replica": state}, lost_servers=0)
    assert missing.grade == "warning"


def test_a_replica_without_a_connection_is_named_with_the_reason() -> None:
    (well,) = fleet_checks.connections({"replicas": 2})
    (wrong,) = fleet_checks.connections(
        {"replicas": 2, "unconnected": {"a": "10.0.0.2:20000: refused"}}
    )
    assert (well.grade, wrong.grade) == ("ok", "wrong")
    assert "replica a: 10.0.0.2:20000: refused" in wrong.finding
    assert "--replica-ports" in wrong.remedy


def test_a_replica_with_another_tokenizer_is_wrong() -> None:
    (well,) = fleet_checks.handshake({"replicas": 2})
    blind = {
        "a": f"{UNKNOWN_LAYOUT}kvroute does not know which blocks a hit needs in telepathy layers"
    }
    (other,) = fleet_checks.handshake({"replicas": 2, "degraded": blind})
    assert (other.grade, other.remedy) == ("wrong", fleet_checks.BY_LOAD)
    (wrong,) = fleet_checks.handshake(
        {"replicas": 2, "degraded": {"a": "its tokenizer is another one"}}
    )
    assert (well.grade, wrong.grade) == ("ok", "wrong")
    assert wrong.finding == "replica a: its tokenizer is another one"


def of_hits(requests: int = 100, **tokens: int) -> list[Check]:
    ledger = dict.fromkeys(CAUSES, 0) | tokens
    return [*load_checks.hits({"window_s": 300, "requests": requests, "tokens": ledger})]


@pytest.mark.parametrize("cause", load_checks.LIMITS)
def test_a_cause_that_costs_many_hits_is_a_warning_with_its_share(cause: str) -> None:
    (check,) = of_hits(hit=60, new=10, **{cause: 30})
    assert (check.name, check.grade) == ("hits", "warning")
    assert check.finding.startswith(f"{cause}: 30% of the prompts' tokens")
    assert check.remedy


def test_few_misses_are_ok_and_listed_largest_first() -> None:
    (check,) = of_hits(hit=700, unexpected_hit=50, new=160, spilled=90)
    assert check.grade == "ok"
    assert check.finding == (
        "in 5 minutes, 75% of 1,000 prompt tokens came from a cache; 16% were never cached; "
        "9% were cached on a busier replica"
    )


def test_few_requests_are_not_judged() -> None:
    (check,) = of_hits(requests=3, stale=100)
    assert check.grade == "ok"


def test_a_slow_replica_is_named() -> None:
    (slow,) = load_checks.speeds({"abc": 2.125})
    assert slow.finding == "replica abc computes prompts 2.1 times as slowly as the others"
    assert (slow.grade, "nvidia-smi" in slow.remedy) == ("warning", True)
    (well,) = load_checks.speeds({})
    assert well.grade == "ok"


def test_one_replica_with_a_long_queue_is_named_and_a_busy_fleet_is_a_warning() -> None:
    (one,) = load_checks.load({"a": 30.0, "b": 0.5, "c": 0.0})
    assert (one.grade, "replica a has 30 s" in one.finding) == ("warning", True)
    (full,) = load_checks.load({"a": 30.0, "b": 20.0, "c": 10.0})
    assert (full.grade, "add replicas" in full.remedy) == ("warning", True)
    (well,) = load_checks.load({"a": 0.5, "b": 0.0})
    assert well.grade == "ok"


def test_another_version_of_the_command_is_a_warning() -> None:
    cluster = {"kvroute": "0.1.0", "ray": "2.60.0"}
    assert checks.versions(cluster, "0.1.0", ["10.0.0.1"]).grade == "ok"
    assert checks.versions(cluster, "0.2.0", None).grade == "warning"


def test_a_clock_is_wrong_only_if_it_certainly_differs() -> None:
    here = Offset(-0.1, 0.1)
    assert [check.grade for check in clocks.judge(here, here, {"replica a": here})] == ["ok"]
    slow_answer = Offset(-3.0, 3.0)
    assert [check.grade for check in clocks.judge(here, None, {"a": slow_answer})] == ["ok"]
    (check,) = clocks.judge(here, None, {"replica a": Offset(4.0, 4.2)})
    assert (check.grade, check.finding) == ("wrong", "replica a is 3.9 s ahead of the router")
    (check,) = clocks.judge(here, Offset(-9.1, -9.0), {})
    assert (check.grade, check.finding) == ("wrong", "Redis is 9.0 s behind the router")


def test_a_wrong_clock_of_this_computer_is_not_the_clusters_fault() -> None:
    ahead = Offset(7.0, 7.1)
    (check,) = clocks.judge(ahead, None, {"replica a": Offset(6.8, 7.9)})
    assert (check.grade, check.finding) == ("warning", "the router is 7.0 s ahead of this computer")


def test_a_date_header_gives_a_clock_to_the_second() -> None:
    sent = clocks.dated(
        "Sat, 21 Nov 2026 14:00:00 GMT", sent_s=1795269600.2, received_s=1795269600.4
    )
    assert sent is not None
    assert sent == pytest.approx((-0.4, 0.8), abs=1e-6)
    assert clocks.dated(None, sent_s=0, received_s=1) is None


def test_one_closed_port_is_wrong_and_only_closed_ports_are_a_warning() -> None:
    well, closed = Probe("replica a", "10.0.0.1:1"), Probe("replica b", "10.0.0.2:1", "refused")
    assert [check.grade for check in metrics_ports.judge([well, well])] == ["ok"]
    (one,) = metrics_ports.judge([well, closed])
    assert (one.grade, one.finding) == ("wrong", "replica b at 10.0.0.2:1: refused")
    assert [check.grade for check in metrics_ports.judge([closed, closed])] == ["warning"]
    assert [check.grade for check in metrics_ports.judge([])] == ["ok"]


def test_a_port_without_a_listener_is_named() -> None:
    labels = {"role": "replica", "replica": "a"}
    target = {"targets": [f"127.0.0.1:{free_port()}"], "labels": labels}
    (probe,) = metrics_ports.probes([target], {})
    assert probe.process == "replica a"
    assert "refused" in probe.problem


def test_a_process_that_needs_the_token_is_no_closed_port(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("right\n")
    exposition = Exposition("127.0.0.1", token_file=tmp_path / "token")
    target = {"targets": [exposition.address], "labels": {"role": "replica", "replica": "a"}}
    try:
        (without,) = metrics_ports.probes([target], {})
        (wrong,) = metrics_ports.probes([target], {"authorization": "Bearer wrong"})
        (right,) = metrics_ports.probes([target], {"authorization": "Bearer right"})
    finally:
        exposition.close()
    assert right.problem == ""
    for found in ([without], [right, wrong]):
        (check,) = metrics_ports.judge(found)
        assert check.grade == "warning"
        assert "KVROUTE_METRICS_TOKEN_FILE" in check.remedy


def test_closed_ports_are_named_besides_ports_that_need_the_token() -> None:
    locked = Probe("replica a", "10.0.0.1:1", metrics_ports.ASKS_FOR_TOKEN)
    closed = Probe("replica b", "10.0.0.2:1", "refused")
    token, port = metrics_ports.judge([locked, closed])
    assert (token.grade, token.finding) == (
        "warning",
        "1 of 2 processes need a token, such as replica a",
    )
    assert (port.grade, port.finding) == ("wrong", "replica b at 10.0.0.2:1: refused")


def test_a_replica_without_metrics_is_named_unless_no_process_has_metrics() -> None:
    router = {"targets": ["h:1"], "labels": {"role": "router", "router": "r"}}
    replica = {"targets": ["h:2"], "labels": {"role": "replica", "replica": "a"}}
    assert not [*metrics_ports.judge_missing(["a.0", "a.1"], [router, replica])]
    (check,) = metrics_ports.judge_missing(["a", "b"], [router, replica])
    assert (check.grade, check.finding) == ("warning", "1 of 2 replicas have no metrics, such as b")
    assert "--metrics-port-range" in check.remedy
    assert not [*metrics_ports.judge_missing(["a", "b"], [])]


def test_a_url_without_a_cluster_is_wrong() -> None:
    for url in (f"http://127.0.0.1:{free_port()}", "127.0.0.1", "http://["):
        (check,) = collect_checks(url)
        assert check.grade == "wrong"
        assert url in check.finding


def of_caches(
    *gains: float, replicas: int = 2, is_busy: bool = False, **tokens: int
) -> list[Check]:
    """Return the checks for caches whose 1.25, 1.5 and 2 fold size adds `gains` of hit share."""
    ledger = dict.fromkeys(CAUSES, 0) | tokens
    hits = {"requests": 100, "tokens": ledger}
    ghosts = dict(zip((1.25, 1.5, 2.0), (1000 * gain for gain in gains), strict=True))
    return [
        *cache_size.judge("m", hits, [CacheReading(1000, 400, ghosts)] * replicas, is_busy=is_busy)
    ]


def test_hits_that_a_larger_cache_would_find_call_for_memory_and_under_load_for_a_replica() -> None:
    (idle,) = of_caches(0.02, 0.05, 0.08, hit=80, evicted=20)
    assert (idle.name, idle.grade) == ("cache", "warning")
    assert idle.finding == (
        "20% of prompt tokens were lost to eviction; hit share of m since its start: 40%; "
        "estimated for larger caches: 42% at 1.25x, 45% at 1.5x, 48% at 2x"
    )
    assert idle.remedy.startswith("more memory: +5.0 points of hit share with a cache of 1.5 times")
    (busy,) = of_caches(0.02, 0.05, 0.08, hit=80, evicted=20, is_busy=True)
    assert busy.grade == "warning"
    assert busy.remedy.startswith("one more replica, since requests wait: +5.0 points")


def test_one_more_replica_brings_its_share_of_the_fleets_cache() -> None:
    for replicas, points in ((1, "8.0"), (2, "5.0"), (3, "3.0"), (4, "2.0"), (8, "1.0")):
        (check,) = of_caches(0.02, 0.05, 0.08, replicas=replicas, evicted=100, is_busy=True)
        assert f"+{points} points" in check.remedy


def test_no_remedy_is_named_if_larger_caches_would_not_help() -> None:
    (check,) = of_caches(0.0, 0.01, 0.029, hit=90, evicted=10, is_busy=True)
    assert (check.grade, check.remedy) == ("ok", "")
    assert check.finding.endswith("neither more memory nor one more replica helps")
    (well,) = of_caches(0.0, 0.01, 0.029, hit=96, evicted=4)
    assert well.grade == "ok"
    assert "neither" not in well.finding
    (worth,) = of_caches(0.0, 0.01, 0.03, hit=90, evicted=10)
    assert worth.grade == "warning"


def test_caches_are_not_judged_by_few_requests_or_idle_replicas() -> None:
    hits = {"requests": 19, "tokens": {"evicted": 100}}
    some, idle = (CacheReading(n, 0, {1.25: n, 1.5: n, 2.0: n}) for n in (1000, 0))
    assert list(cache_size.judge("m", hits, [some], is_busy=False)) == []
    assert list(cache_size.judge("m", hits | {"requests": 99}, [idle], is_busy=False)) == []


def of_disk(*, written: float, read: float = 0.0, evicted: int = 30) -> list[Check]:
    """Return the checks of a disk cache, after prompts of 100 tokens."""
    tokens = dict.fromkeys(CAUSES, 0) | {"hit": 100 - evicted, "evicted": evicted}
    replica = CacheReading(1000, 400, {}, written, read)
    return [*cache_size.judge_disk({"requests": 100, "tokens": tokens}, [replica])]


def test_a_disk_cache_that_is_never_read_is_a_warning_if_blocks_are_missing() -> None:
    (check,) = of_disk(written=2e9)
    assert (check.name, check.grade) == ("disk", "warning")
    assert check.finding == (
        "2.0 GB were written to the disk cache, and 0 bytes read, although 30% of prompt tokens "
        "were lost to eviction"
    )


@pytest.mark.parametrize("differs", [{"read": 1e9}, {"evicted": 0}])
def test_a_disk_cache_that_is_read_or_not_needed_is_ok(differs: dict[str, Any]) -> None:
    (check,) = of_disk(written=2e9, **differs)
    assert check.grade == "ok"


def test_nothing_is_said_about_a_disk_cache_that_is_not_used() -> None:
    assert not of_disk(written=0.0)


def test_a_replicas_metrics_contain_the_counters_of_its_cache() -> None:
    replica, router = (
        [sample for family in registry.collect() for sample in family.samples]
        for registry in (metrics_table.replica(), metrics_table.router())
    )
    assert cache_size.reading(replica) == CacheReading(0, 0, {1.25: 0, 1.5: 0, 2.0: 0})
    assert cache_size.reading(router) is None


def test_a_fleet_is_busy_when_half_of_it_has_long_queues_or_requests_wait() -> None:
    assert not load_checks.is_busy({}, [])
    assert not load_checks.is_busy({"a": 30.0, "b": 0.0, "c": 0.0}, [of_queue()])
    assert load_checks.is_busy({"a": 30.0, "b": 20.0, "c": 0.0}, [])
    assert load_checks.is_busy({}, [of_queue(), of_queue(oldest_s=2.0)])
    assert load_checks.is_busy({}, [of_queue(mean_s=6.0)])
    assert load_checks.is_busy({}, [of_queue(refused={"full": 1})])


def of_queue(
    oldest_s: float = 0.0, mean_s: float = 0.0, refused: dict[str, int] | None = None
) -> dict[str, Any]:
    return {
        "model": "m",
        "requests": 1,
        "lines": {"default": {"requests": 1, "oldest_s": oldest_s, "prefill_s": 1.0}},
        "all_routers": {"requests": 1},
        "recent": {"window_s": 300, "mean_s": mean_s, "refused": refused or {}},
    }


def test_a_cluster_that_is_stopping_is_named_as_such_once() -> None:
    body = {"error": {"message": "the server is stopping; send the request again"}}
    body["error"]["code"] = "stopping"
    transport = httpx.MockTransport(lambda request: httpx.Response(503, json=body))
    with httpx.Client(transport=transport, base_url="http://cluster") as client:
        found = [*_Collection(client, lambda text: None).run(DOCTOR_REQUESTS)]
    assert [(check.name, check.finding) for check in found if check.grade == "wrong"] == [
        ("cluster", "the cluster is stopping")
    ]
