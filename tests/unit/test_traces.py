"""The made traces are traffic of the kind they name, and `kvroute replay` reads them."""

import json
from pathlib import Path

import pytest

from kvroute.replay.closed_loop import native_starts_per_s
from kvroute.replay.trace import Request, ideal_hit_tokens, read
from tests.support.traces import LONGEST_TOKENS, WORKLOADS, agents, documents, lines


def hit_share(requests: list[Request]) -> float:
    return sum(ideal_hit_tokens(requests)) / sum(each.input_tokens for each in requests)


def test_blocks_that_a_line_does_not_name_are_its_own(tmp_path: Path) -> None:
    """Some recorders log ids only for the part of a prompt that was cached."""
    row = {"input_length": 5 * 512, "output_length": 1, "hash_ids": [7, 8]}
    file = tmp_path / "trace.jsonl"
    file.write_text("".join(json.dumps({**row, "timestamp": n}) + "\n" for n in range(2)))
    one, other = read(file, limit=None, seed=0)
    assert len(one.reusable) == len(other.reusable) == 4
    assert one.blocks[:2] == other.blocks[:2]
    assert not {*one.blocks[2:]} & {*other.blocks[2:]}


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_made_trace_is_what_the_replay_reads(name: str, tmp_path: Path) -> None:
    made = WORKLOADS[name](1)
    path = tmp_path / "made.jsonl"
    path.write_text("\n".join(lines(made)) + "\n")
    read_back = read(path, limit=None, seed=0)
    assert [(each.blocks, each.session) for each in read_back] == [
        (each.blocks, each.session) for each in made
    ]
    assert [each.arrival_s for each in read_back] == pytest.approx([r.arrival_s for r in made])
    assert native_starts_per_s(read_back) > 0


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_seed_makes_one_trace(name: str) -> None:
    assert WORKLOADS[name](1) == WORKLOADS[name](1)
    assert WORKLOADS[name](1) != WORKLOADS[name](2)


def test_a_turn_of_an_agent_repeats_the_one_before() -> None:
    last: dict[str | None, Request] = {}
    for turn in agents(1, sessions=50):
        before = last.get(turn.session)
        assert not before or turn.blocks[: len(before.blocks)] == before.blocks
        assert turn.input_tokens <= LONGEST_TOKENS
        last[turn.session] = turn
    assert hit_share(agents(1)) > 0.85


def test_questions_repeat_documents_and_nothing_else() -> None:
    requests = documents(1)
    assert 0.6 < hit_share(requests) < 0.95
    assert max(each.input_tokens for each in requests) > 100_000
