"""How the simulated engine divides its steps between batch requests and others."""

import numpy as np

from kvroute.contract.generation import GenerateRequest
from kvroute.contract.priority import BATCH_S, STEP_PARTS
from kvroute.prefill.speed import PrefillModel
from kvroute.replica.sim_engine.blocks import BlockPool
from kvroute.replica.sim_engine.config import SimulatedConfig
from kvroute.replica.sim_engine.fake_text import StopText, TokenGenerator, Vocabulary
from kvroute.replica.sim_engine.sampling import Sampling
from kvroute.replica.sim_engine.sequences import Job, RunningChoice
from kvroute.replica.sim_engine.sim_scheduler import SimulatedScheduler

STEP = 1024  # the most tokens of a step
LANE = STEP // STEP_PARTS
BLOCK = 16
NOW_S = 10.0


class Engine:
    """A scheduler with a cache. Each step generates a token for each computed prompt."""

    def __init__(self, blocks: int = 1000) -> None:
        config = SimulatedConfig(max_batched_tokens=STEP, block_size=BLOCK, capacity_blocks=blocks)
        self.pool = BlockPool(model="m", block_size=BLOCK, capacity_blocks=blocks)
        self.scheduler = SimulatedScheduler(config, self.pool, PrefillModel(1e6, 32_768.0))
        self.added = 0

    def add(self, name: str, tokens: int, *, is_batch: bool = False) -> RunningChoice:
        self.added += 1
        ids = np.full(tokens, self.added, np.uint32)
        request = GenerateRequest(name, ids, is_batch=is_batch)
        order = NOW_S + (BATCH_S if is_batch else 0.0), self.added
        job = Job(request, Sampling(max_tokens=100), 100, order, unfinished=1)
        table = self.pool.table(ids, request.scope)
        words = TokenGenerator(Vocabulary.of_numbers(range(9)), ids, salt=0)
        choice = RunningChoice(job, 0, table, words, StopText(()))
        self.scheduler.add(choice)
        return choice

    def step(self, now_s: float = NOW_S) -> dict[str, int]:
        batch = self.scheduler.schedule(now_s)
        decoding = dict.fromkeys(self.scheduler.decoding, 1)
        self.scheduler.advance()
        for choice, tokens in batch.items():
            choice.computed += tokens
        for choice in [*decoding, *(choice for choice in batch if not choice.missing)]:
            choice.table.token_ids.append(1)
            choice.generated += 1
            if choice not in decoding:
                self.scheduler.decode(choice)
        batch |= decoding
        return {choice.job.request.request_id: tokens for choice, tokens in batch.items()}


def test_a_batch_alone_uses_whole_steps() -> None:
    engine = Engine()
    for name in ("a", "b"):
        engine.add(name, 700, is_batch=True)
    assert engine.step() == {"a": 700, "b": STEP - 700}


def test_beside_a_decode_one_batch_prompt_gets_the_lane() -> None:
    engine = Engine()
    engine.add("chat", 100)
    assert engine.step() == {"chat": 100}
    for name in ("a", "b"):
        engine.add(name, LANE + 40, is_batch=True)
    assert engine.step() == {"chat": 1, "a": LANE}
    assert engine.step() == {"chat": 1, "a": 40, "b": LANE - 40}
    assert engine.step() == {"chat": 1, "a": 1, "b": LANE}


def test_a_batch_prompt_that_has_begun_gives_way_to_others() -> None:
    engine = Engine()
    engine.add("a", 3000, is_batch=True)
    assert engine.step() == {"a": STEP}
    chat = engine.add("chat", STEP + 100)
    assert engine.step() == {"chat": STEP}
    assert engine.step() == {"chat": 100}
    assert engine.step() == {"chat": 1, "a": LANE}
    engine.scheduler.abort(chat.job)
    assert engine.step() == {"a": STEP}


def test_no_batch_request_is_admitted_while_another_waits() -> None:
    engine = Engine()
    for name in ("chat", "other"):
        engine.add(name, STEP)
    engine.add("a", 10, is_batch=True)
    assert engine.step() == {"chat": STEP}
    assert engine.step() == {"chat": 1, "other": STEP - 1}
    assert engine.step() == {"chat": 1, "other": 1, "a": 10}


def test_a_batch_request_leaves_the_lane_after_a_time() -> None:
    engine = Engine()
    engine.add("chat", 100)
    engine.step()
    engine.add("a", 700, is_batch=True)
    assert engine.step(NOW_S + BATCH_S) == {"chat": 1, "a": 700}


def test_batch_requests_are_preempted_if_another_request_lacks_blocks() -> None:
    engine = Engine()
    for name in ("a", "b", "c"):
        engine.add(name, 5000, is_batch=True)
    for _ in range(15):
        engine.step()  # the three hold 940 of 1,000 blocks
    chat = engine.add("chat", 1200)
    assert engine.step() == {"a": 1, "b": 1, "chat": STEP - 2}
    engine.step()
    engine.scheduler.abort(chat.job)
    assert engine.step()["c"] > 0
