"""Batch requests in a replay: how modelled replicas and kvroute's policy treat them."""

from dataclasses import replace

from kvroute.contract.priority import BATCH_S, STEP_PARTS
from kvroute.prefill.speed import PrefillModel
from kvroute.replay.hardware.engine_model import EngineModel
from kvroute.replay.modelled_engine import ModelledReplica
from kvroute.replay.simulate import Cluster, simulate
from kvroute.replay.workload.trace import Request
from tests.support.conversations import request

TOKENS = 16_000  # of a step
MODEL = EngineModel(
    PrefillModel(1000.0, 1e12), step_s=1.0, sequence_s=0.0, context_token_s=0.0, chunk_tokens=TOKENS
)
BLOCK = request(0, [1], 1).block_tokens


def planned(replica: ModelledReplica) -> dict[int, int]:
    """Return the prompt tokens of the steps that run now, by request."""
    assert replica.plan is not None
    return {sequence.request.index: tokens for sequence, tokens in replica.plan.chunks.items()}


def prompt(index: int, tokens: int, output: int = 2) -> Request:
    blocks = [1000 * index + number for number in range(1, tokens // BLOCK + 1)]
    return replace(request(index, blocks, output), input_tokens=tokens)


def arrive(replica: ModelledReplica, coming: Request, *, is_batch: bool = False) -> None:
    order_s = BATCH_S if is_batch else 0.0
    replica.arrive(coming, replica._now_s, order_s, is_batch=is_batch)


def test_a_batch_alone_uses_whole_steps_and_beside_an_answer_a_part() -> None:
    replica = ModelledReplica(MODEL, 1000)
    arrive(replica, prompt(0, 40_000), is_batch=True)
    assert planned(replica) == {0: TOKENS}
    arrive(replica, prompt(1, 5_000, output=3))
    replica.end_step()
    assert planned(replica) == {1: 5_000}
    replica.end_step()
    assert planned(replica) == {0: TOKENS // STEP_PARTS}


def test_a_preempted_batch_request_gets_each_token_once() -> None:
    replica = ModelledReplica(MODEL, 100)
    arrive(replica, prompt(0, 90 * BLOCK, output=200), is_batch=True)
    while not replica.end_step().first_tokens:
        pass
    arrive(replica, prompt(1, 50 * BLOCK))
    first, finished = [], []
    while replica.plan:
        result = replica.end_step()
        first += [done.index for done in result.first_tokens]
        finished += [done.index for done in result.finished]
    assert (first, finished) == ([1], [1, 0])
    assert len(replica.cache.free) == 100
    assert replica.context_tokens == 0


def test_batch_requests_wait_in_the_router_and_all_are_answered() -> None:
    chats = [replace(prompt(index, 4_000), arrival_s=float(index)) for index in range(20)]
    batch = [replace(prompt(index, 3_000), is_batch=True) for index in range(20, 60)]
    cluster = Cluster(replicas=2, kv_tokens=200_000)
    everything = [*chats, *batch]
    outcome = simulate(everything, cluster, "kvroute")
    assert all(outcome.finished_s)
    queued = simulate(everything, cluster, "kvroute", queued=range(30, 60))
    assert all(queued.finished_s)
