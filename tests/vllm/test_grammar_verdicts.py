"""Grammars that arrive together while their process starts get their own verdicts."""

import asyncio
from typing import Any

import msgspec
import pytest

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own


async def test_each_grammar_gets_its_own_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvroute.replica.vllm_engine.grammar.check import GrammarCheck
    from kvroute.replica.vllm_engine.grammar.process import GrammarJob, Verdict

    check, loop = GrammarCheck(None, 1.0), asyncio.get_running_loop()

    class Process:
        """Answers each job at once, with the job's own regex as the verdict."""

        def send(self, packed: bytes) -> None:
            job = msgspec.msgpack.decode(packed, type=GrammarJob)
            verdict = Verdict(job.number, error=job.spec["regex"])
            loop.call_soon_threadsafe(answer, verdict)

    def answer(verdict: Verdict) -> None:
        future = check._verdicts.pop(verdict.number)
        future.set_result(verdict)

    process = Process()

    async def start() -> Any:
        await asyncio.sleep(0.01)  # all grammars arrive before the process has started
        return process

    monkeypatch.setattr(check, "_running_process", start)
    regexes = [f"a{number}" for number in range(4)]
    async with asyncio.timeout(20):
        verdicts = await asyncio.gather(*(check._verdict({"regex": each}) for each in regexes))
    assert [verdict.error for verdict in verdicts] == regexes
