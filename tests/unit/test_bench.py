"""The benchmarks' tables, and the chats they send."""

import asyncio
from itertools import pairwise

from tests.bench.report import Row, Section
from tests.bench.routers import turns
from tests.bench.stream.caller import Caller
from tests.bench.stream.load import Load, first_tokens
from tests.bench.stream.mock_engine import END, STREAM_HEAD, event


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


class Sent(asyncio.Transport):
    """A transport that ignores all data that is written to it."""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        pass


def caller_of(tokens: int, failed: asyncio.Future[None]) -> Caller:
    caller = Caller(0, "m", tokens=tokens, first=tokens, streamed=True, failed=failed)
    caller.connection_made(Sent())
    return caller


async def test_tokens_that_are_joined_in_one_event_are_counted_one_by_one() -> None:
    caller = caller_of(3, asyncio.get_running_loop().create_future())
    for byte in STREAM_HEAD + event('{"content":" two words"}') + END:
        caller.data_received(bytes([byte]))
    assert (caller.tally.tokens, caller.tally.events, caller.tally.answers) == (3, 2, 1)


async def test_an_answer_with_too_few_tokens_fails_the_load() -> None:
    failed = asyncio.get_running_loop().create_future()
    caller_of(3, failed).data_received(STREAM_HEAD + END)
    assert "1 tokens of 3" in str(failed.exception())


def test_streams_of_a_steady_load_end_at_different_times() -> None:
    assert first_tokens(Load(model="m", concurrent=4, tokens=200)) == [50, 100, 150, 200]
    assert first_tokens(Load(model="m", concurrent=3, tokens=1)) == [1, 1, 1]
