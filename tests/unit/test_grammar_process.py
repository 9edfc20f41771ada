"""A grammar that exceeds a limit ends only its own process; the next grammar is compiled."""

import multiprocessing
import os
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import pytest

from kvroute.replica.vllm_engine.grammar.process import (
    MAX_TEXT,
    MEMORY_BYTES,
    Compile,
    GrammarJob,
    SlowStepError,
    Verdict,
    serve,
)

CPU_S = 0.1


def compiled(spec: dict[str, Any]) -> str:
    match spec["does"]:
        case "ok":
            return "xgrammar"
        case "compute":
            while True:
                pass
        case "sleep":
            time.sleep(600)
        case "allocate":
            return str(len(bytearray(2 * MEMORY_BYTES)))
        case "abort":
            os.abort()
        case "slow step":
            raise SlowStepError
    raise ValueError(spec["does"])


def loaded() -> Compile:
    return compiled


@pytest.fixture(scope="module")
def pipes() -> Iterator[tuple[Connection, Connection]]:
    receiver, jobs = multiprocessing.Pipe(duplex=False)
    results, sender = multiprocessing.Pipe(duplex=False)
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=serve, args=(receiver, sender, loaded, CPU_S))
    process.start()
    yield jobs, results
    jobs.close()
    process.join(10)
    assert process.exitcode == 0


def verdict(pipes: tuple[Connection, Connection], number: int, does: str) -> Verdict:
    jobs, results = pipes
    jobs.send_bytes(msgspec.msgpack.encode(GrammarJob(number, {"does": does})))
    assert results.poll(30), does
    return msgspec.msgpack.decode(results.recv_bytes(), type=Verdict)


@pytest.mark.parametrize(
    ("does", "limit"),
    [
        ("compute", "cpu"),
        ("sleep", "wall"),
        ("allocate", "memory"),
        ("abort", "memory"),
        ("slow step", "step"),
    ],
)
def test_a_grammar_over_a_limit_affects_no_other(
    pipes: tuple[Connection, Connection], does: str, limit: str
) -> None:
    found = verdict(pipes, 1, does)
    if limit == "cpu" and found.limit == "wall":  # other processes have used the CPU
        limit = "wall"
    assert found == Verdict(1, limit=limit)
    assert verdict(pipes, 2, "ok") == Verdict(2, backend="xgrammar")


def test_a_rejected_grammar_has_a_reason(pipes: tuple[Connection, Connection]) -> None:
    assert verdict(pipes, 3, "wrong") == Verdict(3, error="wrong")
    assert verdict(pipes, 4, "x" * 10_000).error == "x" * MAX_TEXT
