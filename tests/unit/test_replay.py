"""A replay: the engine model's arithmetic, fair policies, and reproducible results."""

import json
from pathlib import Path

import pytest
from rich.progress import Progress
from typer.testing import CliRunner

from kvroute.blocks.fingerprint import Fingerprint
from kvroute.cli import app
from kvroute.prefill.speed import PrefillModel
from kvroute.replay.compare import compare, saturation_rps
from kvroute.replay.hardware.engine_model import EngineModel
from kvroute.replay.modelled_engine import ModelledReplica
from kvroute.replay.policies.production import POLICIES
from kvroute.replay.simulate import Cluster, simulate
from kvroute.replay.summary import Summary, summarise
from kvroute.replay.workload.trace import (
    BLOCK_TOKENS,
    Request,
    TraceError,
    at_speed,
    ideal_hit_tokens,
    native_rps,
    read,
)
from tests.support.conversations import conversations, request

NO_ATTENTION = PrefillModel(tokens_per_s=1000.0, attention_tokens=1e12)
ROUND = EngineModel(NO_ATTENTION, step_s=1.0, sequence_s=0.0, context_token_s=0.001)
KEYS = (
    "policy hit_share ideal_share ttft_p50_s ttft_p90_s ttft_p99_s tpot_p90_ms itl_p50_ms "
    "itl_p90_ms itl_p99_ms preemptions goodput throughput_rps "
    "prompt_tokens_per_s imbalance ttft_p90_under_4k_s ttft_p90_4k_16k_s ttft_p90_16k_48k_s "
    "ttft_p90_over_48k_s gpu_hit_share host_hit_share disk_hit_share reload_s reload_wait_ms "
    "sessions session_mean_s session_p50_s session_p90_s slowdown_p50 slowdown_p90 slowdown_p99 "
    "turns_per_min most_sessions_s"
).split()


def run(
    replica: ModelledReplica, arrivals: list[Request]
) -> tuple[dict[int, float], dict[int, float]]:
    """Run one replica alone, and return the times of each request's first and last token."""
    first_s: dict[int, float] = {}
    last_s: dict[int, float] = {}
    coming = list(arrivals)
    while coming or replica.plan:
        if coming and (replica.plan is None or coming[0].arrival_s < replica.plan.ends_s):
            replica.arrive(coming[0], coming.pop(0).arrival_s)
            continue
        assert replica.plan is not None
        now_s = replica.plan.ends_s
        result = replica.end_step()
        first_s |= {done.index: now_s for done in result.first_tokens}
        last_s |= {done.index: now_s for done in result.finished}
    return first_s, last_s


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    rows = [
        {
            "timestamp": 3000 * (r.index // 10),
            "input_length": r.input_tokens,
            "output_length": r.output_tokens,
            "hash_ids": [*r.blocks, 10**9 + r.index],  # the partial block has an id as well
        }
        for r in conversations()
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_prefill_and_decode_take_the_time_computed_by_hand() -> None:
    first_s, last_s = run(ModelledReplica(ROUND, 16), [request(0, [], 3, rest=500)])
    assert first_s[0] == pytest.approx(1.0 + 0.5)  # one step, 500 tokens at 1000/s
    assert last_s[0] == pytest.approx(1.5 + (1 + 0.501) + (1 + 0.502))  # reads 501, then 502


def test_a_long_prompt_is_computed_in_chunks_that_decodes_share() -> None:
    arrivals = [request(0, [], 3, rest=192), request(1, list(range(1, 17)), rest=1, at_s=0.1)]
    first_s, last_s = run(ModelledReplica(ROUND, 80), arrivals)
    assert first_s[0] == pytest.approx(1.192)
    # 8191 of 8193 tokens beside one decode of 193 tokens of context, then 2 beside the next
    second_s = 1.192 + 1 + 0.193 + 8.191
    assert last_s[0] == pytest.approx(second_s + 1 + 0.194 + 0.002)
    assert first_s[1] == pytest.approx(last_s[0])


def test_an_arrival_waits_only_for_the_running_decode_step() -> None:
    arrivals = [request(0, [], 100, rest=500), request(1, [], rest=500, at_s=3.1)]
    first_s, _ = run(ModelledReplica(ROUND, 16), arrivals)
    decodes_end_s = 1.5 + 1.501 + 1.502  # the second one runs at 3.1 s
    assert first_s[1] == pytest.approx(decodes_end_s + 1 + 0.503 + 0.5)


def test_a_repeated_prefix_is_not_computed_again() -> None:
    replica = ModelledReplica(ROUND, 16)
    first_s, _ = run(replica, [request(0, [1, 2, 3]), request(1, [1, 2, 4], at_s=10.0)])
    assert replica.hit_tokens == {0: 0, 1: 2 * BLOCK_TOKENS}
    assert first_s[1] == pytest.approx(10.0 + 1 + 0.513)


def test_siblings_in_one_step_share_the_prefix_that_the_first_computes() -> None:
    replica = ModelledReplica(ROUND, 80)
    run(replica, [request(i, [1, 2], at_s=i / 10) for i in range(3)])
    assert replica.hit_tokens == {0: 0, 1: 2 * BLOCK_TOKENS, 2: 2 * BLOCK_TOKENS}


def test_a_prompt_of_full_blocks_computes_its_last_one_again() -> None:
    replica = ModelledReplica(ROUND, 16)
    run(replica, [request(0, [1, 2], rest=0), request(1, [1, 2], rest=0, at_s=9.0)])
    assert replica.hit_tokens[1] == BLOCK_TOKENS


def test_the_oldest_prompt_is_evicted_from_its_tail() -> None:
    replica = ModelledReplica(ROUND, 6)
    prompts = [[1, 2], [3, 4], [5, 6], [1, 7]]
    run(replica, [request(i, p, at_s=10.0 * i) for i, p in enumerate(prompts)])
    assert replica.hit_tokens[3] == BLOCK_TOKENS  # 2 went, 1 is still there


def test_a_prompt_waits_while_there_is_no_room_for_it() -> None:
    replica = ModelledReplica(ROUND, 4)
    arrivals = [request(0, [1, 2], 3), request(1, [3, 4], 3)]
    first_s, last_s = run(replica, arrivals)
    assert first_s[1] > last_s[0]
    assert len(replica.cache.free) == 4


def test_changes_name_every_block_that_the_cache_gains_or_loses() -> None:
    replica = ModelledReplica(ROUND, 12)
    held: set[Fingerprint] = set()
    for coming in conversations(count=1, turns=10):
        if len(coming.blocks) > 10:
            break
        replica.arrive(coming, 0.0)
        while replica.plan:
            result = replica.end_step()
            assert held >= set(result.removed)
            held = held - set(result.removed) | set(result.added)
        assert held == {hash_ for hash_, _ in replica.cache.copies() if hash_ > 0}


@pytest.mark.parametrize("policy", POLICIES)
def test_every_request_is_answered_and_no_cache_beats_the_ideal_one(policy: str) -> None:
    requests = conversations()
    outcome = simulate(requests, Cluster(3, 80_000, routers=2), policy)
    for r, first_s, last_s in zip(requests, outcome.first_token_s, outcome.finished_s, strict=True):
        assert r.arrival_s < first_s <= last_s
    assert 0 < sum(outcome.hit_tokens) <= sum(ideal_hit_tokens(requests))


def test_equal_seeds_give_equal_outcomes() -> None:
    def outcome(seed: int) -> list[float]:
        return simulate(conversations(), Cluster(4, 80_000), "random", seed=seed).first_token_s

    assert outcome(1) == outcome(1)
    assert outcome(1) != outcome(2)


def test_kvroute_has_more_hits_than_random_placement() -> None:
    def hits(policy: str) -> int:
        return sum(simulate(conversations(), Cluster(4, 200_000), policy).hit_tokens)

    assert hits("kvroute") > 1.2 * hits("random")


def test_routers_that_exchange_messages_spread_a_burst_of_new_prompts() -> None:
    rush = [request(i, list(range(100 * i, 100 * i + 20)), 10, at_s=i / 1000) for i in range(16)]

    def slowest_s(share_delay_s: float) -> float:
        cluster = Cluster(8, 400_000, routers=8, share_delay_s=share_delay_s)
        return max(simulate(rush, cluster, "kvroute").first_token_s)

    assert slowest_s(0.0005) < 0.8 * slowest_s(1e6)


def test_requests_of_one_timestamp_are_spread_until_the_next(trace: Path) -> None:
    requests = read(trace, limit=None, seed=0)
    times_s = [r.arrival_s for r in requests]
    assert times_s == sorted(times_s)
    assert len(set(times_s)) == len(times_s)
    assert all(3.0 * (i // 10) <= time_s < 3.0 * (i // 10 + 1) for i, time_s in enumerate(times_s))
    assert [r.arrival_s for r in at_speed(requests, 2.0)] == [time_s / 2 for time_s in times_s]


def test_a_prompt_has_only_its_full_blocks(trace: Path) -> None:
    for r in read(trace, limit=None, seed=0):
        assert len(r.blocks) == r.input_tokens // BLOCK_TOKENS
        assert 0 not in r.blocks


def test_a_line_that_is_no_request_is_named(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"timestamp": 0}\n')
    with pytest.raises(TraceError, match="line 1 is not a request"):
        read(path, limit=None, seed=0)


def line(at_ms: float, blocks: list[int], **more: object) -> str:
    """Return a log line for a prompt of these blocks of 128 tokens and one more token."""
    row = {"timestamp": at_ms, "input_length": 128 * len(blocks) + 1, "output_length": 1}
    return json.dumps(row | {"hash_ids": blocks, "block_size": 128} | more) + "\n"


@pytest.mark.parametrize("policy", POLICIES)
def test_hits_are_counted_in_the_blocks_of_the_trace(tmp_path: Path, policy: str) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text(line(0, [1, 2, 3]) + line(60_000, [1, 2, 4]))
    requests = read(path, limit=None, seed=0)
    assert simulate(requests, Cluster(1, 1024), policy).hit_tokens == [0, 256]


def test_logs_of_several_routers_are_one_trace_in_order_of_time(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(line(9000, [3]) + line(5000, [1]))
    (tmp_path / "b.jsonl").write_text(line(6000, [2]))
    requests = read(tmp_path, limit=None, seed=0)
    assert [(r.arrival_s, r.blocks) for r in requests] == [(0.0, (2,)), (1.0, (3,)), (4.0, (4,))]


def test_a_line_that_a_router_is_writing_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(line(0, [1]) + line(1, [2])[:30])
    (tmp_path / "b.jsonl").write_text(line(2, [3]))
    assert [r.blocks for r in read(tmp_path, limit=None, seed=0)] == [(2,), (4,)]


def test_failed_requests_are_not_replayed(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text(line(0, [1]) + line(1, [1], outcome="failed") + line(2, [1], outcome="ok"))
    assert len(read(path, limit=None, seed=0)) == 2


def test_a_line_with_blocks_of_another_size_is_named(tmp_path: Path) -> None:
    path = tmp_path / "mixed.jsonl"
    path.write_text(line(0, [1]) + line(1, [1], block_size=64, hash_ids=[1, 2]))
    with pytest.raises(TraceError, match="line 2 has blocks of 64 tokens, earlier lines of 128"):
        read(path, limit=None, seed=0)


def test_a_trace_too_short_for_a_saturation_needs_a_speed(tmp_path: Path) -> None:
    path = tmp_path / "short.jsonl"
    path.write_text(line(0, [1]) + line(10, [1]))
    result = CliRunner().invoke(app, ["replay", str(path)])
    assert "2 requests are too few to find the saturation; set --rate or --speed" in result.stderr
    assert CliRunner().invoke(app, ["replay", str(path), "--speed", "1"]).exit_code == 0


def test_a_request_that_no_replica_can_hold_says_how_much_it_needs() -> None:
    with pytest.raises(TraceError, match="--kv-tokens to 2048 or more"):
        simulate([request(0, [1, 2, 3])], Cluster(1, 1024), "kvroute")


def test_the_command_prints_the_agreed_keys(trace: Path) -> None:
    options = ["--replicas", "2", "--kv-tokens", "200000", "--policy", "kvroute,llm-d", "--json"]
    result = CliRunner().invoke(app, ["replay", str(trace), *options])
    rows = json.loads(result.stdout)
    assert [row["policy"] for row in rows] == ["kvroute", "llm-d"]
    assert all(list(row) == KEYS for row in rows)
    assert "saturation" in result.stderr


def test_the_command_prints_a_table(trace: Path) -> None:
    result = CliRunner().invoke(app, ["replay", str(trace), "--speed", "2", "--limit", "50"])
    assert "kvroute" in result.stdout
    assert "p50, s" in result.stdout
    assert "16 x h200-8b, 800,000 tokens of KV cache each; 50 requests" in result.stdout
    assert "*" not in result.stdout  # nothing is better than nothing else


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--policy", "best"], "expected all or some of"),
        (["--load", "0.5", "--speed", "2"], "exclude each other"),
        (["--rate", "5", "--speed", "2"], "exclude each other"),
        (["--closed-loop", "--load", "0.5"], "set --sessions, --rate or --speed"),
        (["--closed-loop", "--sessions", "5", "--rate", "2"], "exclude each other"),
        (["--sessions", "5"], "add --closed-loop"),
        (["--slow", "half"], "expected SHARE:SPEED, such as 0.5:0.8"),
        (["--slow", "2:0.5"], "expected SHARE:SPEED, such as 0.5:0.8"),
        (["--session-ends", "half"], "expected SHARE or SHARE:WRONG"),
        (["--session-ends", "0.5:2"], "expected SHARE or SHARE:WRONG"),
    ],
)
def test_a_wrong_option_says_what_is_right(trace: Path, options: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["replay", str(trace), *options])
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.replace("│", " ").split())


def test_a_log_of_several_models_is_replayed_one_model_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text("".join(line(n, [n], model="ab"[n % 2]) for n in range(5)))
    with pytest.raises(TraceError, match="line 2 is for b, earlier lines for a; set --model"):
        read(path, limit=None, seed=0)
    assert [len(read(path, limit=None, seed=0, model=model)) for model in "ab"] == [3, 2]
    with pytest.raises(TraceError, match="has 0 requests of c"):
        read(path, limit=None, seed=0, model="c")


def test_a_replica_reports_waiting_and_running_requests_and_pending_tokens() -> None:
    replica = ModelledReplica(ROUND, 20)
    replica.arrive(request(0, list(range(1, 19)), 2), 0.0)  # 16 of its 19 blocks in one step
    replica.arrive(request(1, [1, 2], rest=88), 0.1)
    load, pending_tokens = replica.report()
    assert (load.running, load.waiting, load.used_blocks) == (1, 1, 16)
    assert pending_tokens == 18 * BLOCK_TOKENS + 1 + 88
    replica.end_step()  # a chunk of the first prompt
    assert replica.report().pending_tokens == 18 * BLOCK_TOKENS + 1 + 88


@pytest.mark.parametrize("policy", ["kvroute", "llm-d"])
def test_routers_without_messages_use_the_replicas_reports(policy: str) -> None:
    """The second router learns of the first router's requests from reports."""
    long = [request(2 * i, [], rest=100_000, at_s=0.01 * i) for i in range(7)]
    late = [request(2 * i + 1, [], rest=100, at_s=3.0 + 0.01 * i) for i in range(7)]
    cluster = Cluster(8, 400_000, routers=2, share_delay_s=float("inf"))
    requests = sorted(long + late, key=lambda each: each.index)
    outcome = simulate(requests, cluster, policy)
    assert outcome.finished_s[1] - 3.0 < 0.1


def test_routers_with_late_messages_keep_one_order() -> None:
    """One router receives all short prompts, the other all long ones."""
    long = [request(2 * i, [], rest=30_000, at_s=0.01 * i) for i in range(60)]
    short = [request(2 * i + 1, [], rest=8000, at_s=1.0 + 0.01 * i) for i in range(60)]
    requests = sorted(long + short, key=lambda each: each.index)

    def last_short_s(share_delay_s: float) -> float:
        cluster = Cluster(2, 400_000, routers=2, share_delay_s=share_delay_s)
        return max(simulate(requests, cluster, "kvroute").first_token_s[1::2])

    assert last_short_s(0.1) < 1.1 * last_short_s(0.005)


def test_a_slow_replica_takes_longer_and_routers_notice() -> None:
    assert Cluster(4, 80_000, slow_share=0.5, slow_speed=0.5).speeds == [1.0, 0.5, 1.0, 0.5]
    requests = [request(i, [], rest=8000, at_s=0.2 * i) for i in range(60)]

    def prefills(slow_share: float) -> list[float]:
        cluster = Cluster(2, 400_000, slow_share=slow_share, slow_speed=0.25)
        return simulate(requests, cluster, "kvroute").prefill_s

    alone_s = Cluster(2, 400_000).engine.prefill.seconds(0, 8000)
    assert sum(prefills(1.0)) == pytest.approx(60 * 4 * alone_s)
    fast_s, slow_s = prefills(0.5)
    assert slow_s / 4 < 0.7 * fast_s  # fewer requests


def test_tokens_per_second_count_prompts_answered_while_requests_arrive() -> None:
    requests = [
        request(0, [], rest=1000),
        request(1, [], rest=999_999, at_s=0.5),  # takes many times the rest
        request(2, [], rest=2000, at_s=10.0),
    ]
    outcome = simulate(requests, Cluster(1, 2_000_000), "kvroute")
    summary = summarise("kvroute", requests, outcome)
    assert summary.prompt_tokens_per_s == pytest.approx(1000 / 10)
    assert summary.throughput_rps == pytest.approx(1 / 10)


def test_first_tokens_are_timed_by_prompt_size() -> None:
    sizes = [3999, 4000, 16_000, 48_000]
    requests = [request(i, [], rest=size, at_s=60.0 * i) for i, size in enumerate(sizes)]
    summary = summarise("x", requests, simulate(requests, Cluster(1, 400_000), "kvroute"))
    model = Cluster(1, 1).engine
    waits_s = [
        summary.ttft_p90_under_4k_s,
        summary.ttft_p90_4k_16k_s,
        summary.ttft_p90_16k_48k_s,
        summary.ttft_p90_over_48k_s,
    ]
    assert waits_s == pytest.approx([model.alone_s(0, size, 1) for size in sizes])


def test_the_saturation_is_not_raised_by_delaying_long_prompts() -> None:
    """The rate of requests is the rate of served tokens, divided by a request's mean tokens."""
    requests = [
        request(i, [], rest=60_000 if i % 10 == 0 else 1000, at_s=0.01 * i) for i in range(400)
    ]
    cluster = Cluster(2, 400_000)
    with Progress(disable=True) as progress:
        found = saturation_rps(requests, cluster, seed=0, progress=progress)
        fast = at_speed(requests, 2 * found / native_rps(requests))
        (run,) = compare(["dynamo-wspt"], fast, cluster, seed=0, progress=progress)
    mean_tokens = sum(each.input_tokens for each in requests) / len(requests)
    bound_rps = 2 / (0.1 * model_s(60_000) + 0.9 * model_s(1000))
    assert 0.7 * bound_rps < found <= bound_rps
    assert run.summary.prompt_tokens_per_s / mean_tokens < 1.1 * found


def model_s(tokens: int) -> float:
    return Cluster(1, 1).engine.prefill.seconds(0, tokens)


def test_policies_compared_in_processes_have_the_same_results() -> None:
    def summaries(jobs: int) -> list[Summary]:
        with Progress(disable=True) as progress:
            runs = compare(
                ["random", "kvroute"],
                conversations(20),
                Cluster(2, 80_000),
                seed=3,
                progress=progress,
                jobs=jobs,
            )
        return [run.summary for run in runs]

    assert summaries(2) == summaries(1)


def test_a_rate_is_in_requests_per_second(trace: Path) -> None:
    result = CliRunner().invoke(app, ["replay", str(trace), "--rate", "12.5", "--limit", "50"])
    assert "50 requests, 12.50 requests/s = " in " ".join(result.stdout.split())
