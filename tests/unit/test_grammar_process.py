"""A grammar that exceeds a limit ends only its own process; the next grammar is compiled."""

import multiprocessing
import os
import time
from collections.abc import Iterator
from contextlib import nullcontext
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import pytest
import torch

from kvroute.replica.vllm_engine.grammar.process import (
    MAX_TEXT,
    MEMORY_BYTES,
    STEP_S,
    TRIED_STEPS,
    Compile,
    GrammarJob,
    SlowStepError,
    Verdict,
    serve,
    try_out,
)

CPU_S = 0.1
WAIT_S = 300.0  # seconds that the process may take: it has a low priority on a busy machine


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
    process.join(WAIT_S)
    assert process.exitcode == 0


def verdict(pipes: tuple[Connection, Connection], number: int, does: str) -> Verdict:
    jobs, results = pipes
    jobs.send_bytes(msgspec.msgpack.encode(GrammarJob(number, {"does": does})))
    assert results.poll(WAIT_S), does
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


class BusyGrammar:
    """A grammar that allows each token, and takes CPU time for some masks.

    Args:
        first_s: CPU seconds of each mask when it is computed first, by step.
        again_s: when it is computed again.
        accept_s: of each token.
    """

    def __init__(
        self, first_s: dict[int, float], *, again_s: float = 0.0, accept_s: float = 0.0
    ) -> None:
        self._first_s, self._again_s, self._accept_s = first_s, again_s, accept_s
        self._step = 0
        self._is_again = False

    def fill_bitmask(self, mask: torch.Tensor, index: int) -> None:
        mask[index] = -1
        burn(self._again_s if self._is_again else self._first_s.get(self._step, 0.0))
        self._is_again = True

    def accept_tokens(self, _: str, tokens: list[int]) -> bool:
        assert len(tokens) == 1
        burn(self._accept_s)
        self._step, self._is_again = self._step + 1, False
        return True

    def is_terminated(self) -> bool:
        return False


def burn(seconds: float) -> None:
    """Use this much CPU time."""
    end_s = time.thread_time() + seconds
    while time.thread_time() < end_s:
        pass


@pytest.mark.parametrize(
    ("grammar", "is_slow"),
    [
        (BusyGrammar({}), False),
        (BusyGrammar({5: 2 * STEP_S}), False),  # once, as on a busy machine
        (BusyGrammar({5: 2 * STEP_S}, again_s=2 * STEP_S), True),
        (BusyGrammar({5: 2 * TRIED_STEPS * STEP_S}), True),  # longer than all may take together
        (BusyGrammar(dict.fromkeys(range(TRIED_STEPS), 2 * STEP_S)), True),
        (BusyGrammar({}, accept_s=2 * STEP_S), True),
    ],
)
def test_a_mask_that_takes_long_once_is_computed_again(
    grammar: BusyGrammar, *, is_slow: bool
) -> None:
    with pytest.raises(SlowStepError) if is_slow else nullcontext():
        try_out(grammar, torch.zeros((1, 4), dtype=torch.int32))
