"""Host memory in a replay: which blocks are copied back and when, and how the index changes."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvroute.blocks.fingerprint import Fingerprint
from kvroute.blocks.tiers import DISK, HOST
from kvroute.cli import app
from kvroute.contract.records import TierFacts
from kvroute.prefill.speed import PrefillModel
from kvroute.replay.hardware.engine_model import EngineModel
from kvroute.replay.hardware.profiles import PROFILES
from kvroute.replay.modelled_engine import ModelledReplica
from kvroute.replay.policies.production import POLICIES
from kvroute.replay.simulate import Cluster, simulate
from kvroute.replay.summary import summarise
from kvroute.replay.workload.trace import BLOCK_TOKENS, Request, ideal_hit_tokens
from tests.support.conversations import conversations, request
from tests.support.traces import lines

ROUND = EngineModel(
    PrefillModel(tokens_per_s=1000.0, attention_tokens=1e12),
    step_s=1.0,
    sequence_s=0.0,
    context_token_s=0.0,
)
FAST = TierFacts(blocks=100, block_bytes=100, bytes_per_s=1000.0)  # 0.1 s for a block, not 0.512
SLOW = TierFacts(blocks=100, block_bytes=100, bytes_per_s=100.0)  # 1 s


def run(replica: ModelledReplica, arrivals: list[Request]) -> dict[int, float]:
    """Run one replica alone, and return the time of each request's first token."""
    first_s: dict[int, float] = {}
    coming, reloads = list(arrivals), list[float]()
    while coming or reloads or replica.plan:
        assert replica.memory is not None
        times_s = [
            coming[0].arrival_s if coming else 1e9,
            min(reloads, default=1e9),
            replica.plan.ends_s if replica.plan else 1e9,
        ]
        now_s = min(times_s)
        match times_s.index(now_s):
            case 0:
                replica.arrive(coming.pop(0), now_s)
            case 1:
                reloads.remove(now_s)
                replica.end_reload(now_s)
            case _:
                result = replica.end_step()
                first_s |= {done.index: now_s for done in result.first_tokens}
        reloads += replica.memory.new_ends_s
        replica.memory.new_ends_s.clear()
    return first_s


def flooded(at_s: float = 20.0) -> list[Request]:
    """Return a prompt, and others that evict it from a GPU cache of 6 blocks."""
    return [
        request(0, [1, 2, 3]),
        request(1, [11, 12, 13, 14, 15], at_s=at_s / 2),
    ]


def test_a_block_that_the_gpu_has_evicted_is_copied_back() -> None:
    replica = ModelledReplica(ROUND, 6, {HOST: FAST})
    first_s = run(replica, [*flooded(), request(2, [1, 2, 3], at_s=20.0)])
    assert replica.hit_tokens[2] == replica.reloaded_tokens[2][HOST] == 3 * BLOCK_TOKENS
    assert first_s[2] == pytest.approx(20.0 + 0.3 + 1 + 0.001)
    assert replica.reload_wait_s[2] == pytest.approx(0.3)


def test_what_host_memory_has_evicted_is_read_from_the_disk() -> None:
    tiers = {HOST: TierFacts(4, 100, 1000.0), DISK: TierFacts(100, 100, 500.0)}  # 0.1 and 0.2 s
    replica = ModelledReplica(ROUND, 6, tiers)
    again = [request(2, [1, 2, 3], at_s=20.0), request(3, [21, 22, 23, 24, 25], at_s=40.0)]
    first_s = run(replica, [*flooded(), *again, request(4, [1, 2, 3], at_s=60.0)])
    assert replica.reloaded_tokens[2] == {DISK: 3 * BLOCK_TOKENS}
    assert first_s[2] == pytest.approx(20.0 + 3 * 0.2 + 1 + 0.001)


def test_blocks_come_from_the_fastest_tier_that_has_them() -> None:
    tiers = {HOST: TierFacts(6, 100, 1000.0), DISK: TierFacts(100, 100, 500.0)}
    replica = ModelledReplica(ROUND, 6, tiers)
    flood = request(1, [11, 12, 13, 14, 15], at_s=10.0)  # of the first prompt, block 1 is left
    run(replica, [request(0, [1, 2, 3]), flood, request(2, [1, 2, 3], at_s=20.0)])
    assert replica.reloaded_tokens[2] == {HOST: BLOCK_TOKENS, DISK: 2 * BLOCK_TOKENS}
    assert replica.reload_wait_s[2] == pytest.approx(0.1 + 2 * 0.2)
    assert replica.memory is not None
    assert replica.memory.hits_in_host(request(3, [1, 2, 3, 4]), 0) == 3  # they are there, too


def test_a_disk_that_is_slower_than_computing_is_not_read() -> None:
    tiers = {HOST: TierFacts(4, 100, 1000.0), DISK: TierFacts(100, 100, 100.0)}
    replica = ModelledReplica(ROUND, 6, tiers)
    run(replica, [*flooded(), request(2, [1, 2, 3], at_s=20.0)])
    assert replica.hit_tokens[2] == 0


def test_blocks_that_compute_faster_than_their_copy_are_computed() -> None:
    replica = ModelledReplica(ROUND, 6, {HOST: SLOW})
    first_s = run(replica, [*flooded(), request(2, [1, 2, 3], at_s=20.0)])
    assert replica.hit_tokens[2] == 0
    assert first_s[2] == pytest.approx(20.0 + 1 + 1.537)


def test_hits_in_gpu_memory_come_first_and_the_rest_is_copied() -> None:
    replica = ModelledReplica(ROUND, 6, {HOST: FAST})
    run(
        replica,
        [request(0, [1, 2, 3]), request(1, [9, 10, 11], at_s=10), request(2, [1, 2, 3], at_s=20)],
    )
    assert replica.hit_tokens[2] == 3 * BLOCK_TOKENS
    assert replica.reloaded_tokens[2] == {HOST: BLOCK_TOKENS}  # the tail, which went first


def test_others_run_while_one_waits_for_its_copy() -> None:
    replica = ModelledReplica(ROUND, 9, {HOST: TierFacts(100, 100, 200.0)})  # 0.5 s a block
    last = [request(2, [1, 2, 3], at_s=30.0), request(3, [], at_s=30.1)]
    flood = request(1, [11, 12, 13, 14, 15, 16, 17, 18], at_s=15.0)
    first_s = run(replica, [request(0, [1, 2, 3]), flood, *last])
    assert first_s[3] == pytest.approx(30.1 + 1.001)
    assert first_s[2] == pytest.approx(30.0 + 1.5 + 1.001)


def test_copies_come_one_after_another() -> None:
    replica = ModelledReplica(ROUND, 12, {HOST: FAST})
    prompts = [[1, 2, 3], [4, 5, 6], list(range(20, 31)), [1, 2, 3], [4, 5, 6]]
    times_s = [0.0, 10.0, 20.0, 40.0, 40.0]
    run(
        replica,
        [request(i, p, at_s=t) for i, (p, t) in enumerate(zip(prompts, times_s, strict=True))],
    )
    assert replica.reload_wait_s == {3: pytest.approx(0.3), 4: pytest.approx(0.6)}


def test_requests_share_a_running_copy_of_the_same_blocks() -> None:
    replica = ModelledReplica(ROUND, 6, {HOST: FAST})
    again = [request(2, [1, 2, 3], at_s=20.0), request(3, [1, 2, 4], at_s=20.1)]
    run(replica, [*flooded(), *again])
    assert replica.reloaded_tokens == {2: {HOST: 3 * BLOCK_TOKENS}}
    assert replica.hit_tokens[3] == 2 * BLOCK_TOKENS
    assert replica.memory is not None
    assert replica.memory.reload_s == pytest.approx(0.3)


@pytest.mark.parametrize("blocks", [4, 30])
def test_changes_list_the_blocks_that_each_tier_gains_or_loses(blocks: int) -> None:
    tiers = {HOST: replace_blocks(blocks), DISK: replace_blocks(2 * blocks)}
    replica = ModelledReplica(ROUND, 12, tiers)
    held: set[Fingerprint] = set()
    for coming in conversations(count=2, turns=6):
        if len(coming.blocks) > 10:
            continue
        replica.arrive(coming, 0.0)
        while replica.plan or len(replica.memory or ()):
            assert replica.memory is not None
            if replica.memory.new_ends_s and not replica.plan:
                replica.end_reload(replica.memory.new_ends_s.pop(0))
                continue
            result = replica.end_step()
            held = held - set(result.removed) | set(result.added)
    assert replica.memory is not None
    gpu = {hash_ for hash_, _ in replica.cache.copies() if hash_ > 0}
    slower = {
        level.tier.fingerprint(hash_)
        for level in replica.memory.levels
        for hash_ in level.cache
        if hash_ > 0
    }
    assert held == gpu | slower


def replace_blocks(blocks: int) -> TierFacts:
    return TierFacts(blocks, block_bytes=100, bytes_per_s=1000.0)


def cluster(host_tokens: int, host_gb_per_s: float = 50.0, disk_tokens: int = 0) -> Cluster:
    return Cluster(
        3,
        40_000,
        host_tokens=host_tokens,
        host_gb_per_s=host_gb_per_s,
        disk_tokens=disk_tokens,
    )


@pytest.mark.parametrize("policy", POLICIES)
def test_host_memory_brings_hits_under_every_policy(policy: str) -> None:
    requests = conversations()
    one, two = (simulate(requests, cluster(tokens), policy) for tokens in (0, 400_000))
    assert 0 < sum(two.reloaded_tokens) <= sum(two.hit_tokens) <= sum(ideal_hit_tokens(requests))
    assert sum(one.hit_tokens) < sum(two.hit_tokens)
    assert sum(two.reload_s) > 0 == sum(one.reload_s) == sum(one.reloaded_tokens)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_disk_brings_hits_under_every_policy(policy: str) -> None:
    requests = conversations()
    one, two = (
        simulate(requests, cluster(20_000, disk_tokens=tokens), policy) for tokens in (0, 400_000)
    )
    assert sum(one.disk_tokens) == 0 < sum(two.disk_tokens) <= sum(two.reloaded_tokens)
    assert sum(one.hit_tokens) < sum(two.hit_tokens) <= sum(ideal_hit_tokens(requests))


def test_hits_are_reported_by_tier() -> None:
    requests = conversations()
    summary = summarise("kvroute", requests, simulate(requests, cluster(400_000), "kvroute"))
    assert summary.hit_share == pytest.approx(summary.gpu_hit_share + summary.host_hit_share)
    assert summary.host_hit_share > 0 < summary.reload_wait_ms
    outcome = simulate(requests, cluster(60_000, disk_tokens=400_000), "kvroute")
    with_disk = summarise("kvroute", requests, outcome)
    shares = with_disk.gpu_hit_share, with_disk.host_hit_share, with_disk.disk_hit_share
    assert with_disk.hit_share == pytest.approx(sum(shares))
    assert min(shares) > 0


def test_host_memory_that_is_too_slow_is_not_used() -> None:
    requests = conversations()
    none = simulate(requests, cluster(0), "sglang")
    slow = simulate(requests, cluster(400_000, host_gb_per_s=0.001), "sglang")
    assert slow.first_token_s == none.first_token_s


def test_the_command_shows_where_hits_were(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join(lines(conversations())))
    options = ["--replicas", "2", "--kv-tokens", "40000", "--rate", "5"]
    shown = CliRunner().invoke(app, ["replay", str(trace), *options, "--host-tokens", "400000"])
    assert "in host memory" in shown.stdout
    assert "on disk" not in shown.stdout
    assert "in host memory" not in CliRunner().invoke(app, ["replay", str(trace), *options]).stdout
    more = [*options, "--host-tokens", "20000", "--disk-tokens", "400000"]
    assert "on disk" in CliRunner().invoke(app, ["replay", str(trace), *more]).stdout
    refused = CliRunner().invoke(app, ["replay", str(trace), *options, "--disk-tokens", "4000"])
    assert refused.exit_code == 2
    assert "--disk-tokens needs --host-tokens" in refused.output


def test_every_profile_reloads_sooner_than_it_computes() -> None:
    for profile in PROFILES.values():
        assert profile.kv_bytes / (1e9 * profile.host_gb_per_s) < 1 / profile.prefill_tokens_per_s
