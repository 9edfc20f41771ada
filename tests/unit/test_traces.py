"""The generated traces have the properties of their kind, and `kvroute replay` reads them."""

import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from statistics import median

import pytest
from typer.testing import CliRunner

from kvroute.cli import app
from kvroute.replay.workload.closed_loop import native_starts_per_s
from kvroute.replay.workload.trace import Request, ideal_hit_tokens, read, unnamed
from tests.support.traces import (
    LONGEST_TOKENS,
    WORKLOADS,
    agents,
    fan_outs,
    lines,
)


@cache
def made(name: str) -> Sequence[Request]:
    """Return the trace of this name and the seed 1."""
    return tuple(WORKLOADS[name](1))


def hit_share(requests: Sequence[Request]) -> float:
    return sum(ideal_hit_tokens(requests)) / sum(request.input_tokens for request in requests)


def test_blocks_that_a_line_does_not_name_are_its_own(tmp_path: Path) -> None:
    """Some recorders log ids only for the part of a prompt that was cached."""
    row = {"input_length": 5 * 512, "output_length": 1, "hash_ids": [7, 8]}
    file = tmp_path / "trace.jsonl"
    file.write_text("".join(json.dumps({**row, "timestamp": n}) + "\n" for n in range(2)))
    one, other = read(file, limit=None, seed=0)
    assert len(one.reusable) == len(other.reusable) == 4
    assert one.blocks[:2] == other.blocks[:2]
    assert not {*one.blocks[2:]} & {*other.blocks[2:]}


def test_the_command_says_how_much_of_a_trace_has_no_block_ids(tmp_path: Path) -> None:
    rows = [
        {"timestamp": n, "input_length": 5 * 512, "output_length": 1, "hash_ids": ids}
        for n, ids in enumerate([[7, 8], [7, 8, 9, 10], []])
    ]
    file = tmp_path / "trace.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = CliRunner().invoke(app, ["replay", str(file), "--speed", "1", "--replicas", "1"])
    # The last block of a prompt can never be a hit, so the second prompt misses no block.
    assert "in 2 of 3 requests, 3,072 tokens (40.0% of all tokens)" in result.stderr
    assert unnamed(read(file, limit=2, seed=0)[1:]) == ""


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_made_trace_is_what_the_replay_reads(name: str, tmp_path: Path) -> None:
    written = made(name)[:1000]
    path = tmp_path / "made.jsonl"
    path.write_text("\n".join(lines(written)) + "\n")
    read_back = read(path, limit=None, seed=0)
    assert [(request.blocks, request.session) for request in read_back] == [
        (request.blocks, request.session) for request in written
    ]
    assert [request.arrival_s for request in read_back] == pytest.approx(
        [request.arrival_s for request in written]
    )
    assert native_starts_per_s(read_back) > 0


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_seed_makes_one_trace(name: str) -> None:
    assert (*WORKLOADS[name](1),) == made(name)
    assert (*WORKLOADS[name](2),) != made(name)


def test_a_turn_of_an_agent_repeats_the_one_before() -> None:
    last: dict[str | None, Request] = {}
    for turn in agents(1, sessions=50):
        before = last.get(turn.session)
        assert not before or turn.blocks[: len(before.blocks)] == before.blocks
        assert turn.input_tokens <= LONGEST_TOKENS
        last[turn.session] = turn
    assert hit_share(made("agents")) > 0.85


def test_questions_repeat_documents_and_nothing_else() -> None:
    requests = made("documents")
    assert 0.6 < hit_share(requests) < 0.95
    assert max(request.input_tokens for request in requests) > 100_000


def test_chats_repeat_a_third_of_their_prompts() -> None:
    assert 0.25 < hit_share(made("chats")) < 0.45


def test_rollouts_start_together_and_have_5_to_99_turns() -> None:
    requests = made("rollouts")
    turns = Counter(request.session for request in requests)
    starts_s = {request.session: request.arrival_s for request in reversed(requests)}
    assert max(starts_s.values()) < 1.0
    assert 5 <= min(turns.values()) < 8
    assert max(turns.values()) == 99
    assert 26 < median(turns.values()) < 32


def test_sub_agents_of_a_family_start_together_from_one_prefix() -> None:
    first: dict[str | None, Request] = {}
    for request in fan_outs(1, families=20, width=(16, 16)):
        first.setdefault(request.session, request)
    families: dict[str, list[Request]] = defaultdict(list)
    for name, request in first.items():
        families[str(name).split("/")[0]].append(request)
    assert {len(members) for members in families.values()} == {16}
    for members in families.values():
        arrivals_s = [member.arrival_s for member in members]
        assert max(arrivals_s) - min(arrivals_s) < 0.1
        shared = set.intersection(*(set(member.blocks) for member in members))
        assert len(shared) >= min(len(member.blocks) for member in members) - 1
