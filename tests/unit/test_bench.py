"""The benchmarks' tables, and the chats they send."""

from itertools import pairwise

from tests.bench.report import Row, Section
from tests.bench.routers import turns


def test_a_column_that_nothing_was_measured_for_is_left_out() -> None:
    rows: list[Row] = [{"tokens": 1024, "ours": 0.25, "theirs": None}]
    table = Section("Decision", rows, notes=["Theirs is left out."]).markdown().splitlines()
    assert table[2:5] == ["| tokens | ours |", "| --- | --- |", "| 1,024 | 0.250 |"]
    assert table[-1] == "Theirs is left out."


def test_every_run_of_a_seed_sends_the_same_chats() -> None:
    assert turns(3) == turns(3) != turns(4)


def test_a_chat_repeats_what_came_before() -> None:
    sent = sorted(turns(0), key=lambda turn: (turn.prompt[:1000], turn.at_s))
    repeats = [turn.prompt == then.prompt[: len(turn.prompt)] for turn, then in pairwise(sent)]
    assert sum(repeats) > len(repeats) / 2
