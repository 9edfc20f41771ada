"""vLLM's own scheduler on a modelled clock, to hold the model of an engine against it."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

from kvroute.blocks.fingerprint import Fingerprint
from kvroute.replay.hardware.engine_model import EngineModel
from kvroute.replay.modelled_engine import ModelledReplica
from kvroute.replay.workload.trace import Request
from tests.support import schedulers

BLOCK = schedulers.BLOCK


@dataclass
class Served:
    """What an engine has done: values by the index of a request."""

    first_token_s: dict[int, float]
    finished_s: dict[int, float]
    hit_tokens: dict[int, int]
    preemptions: int = 0


def with_small_blocks(requests: Sequence[Request]) -> list[Request]:
    """Return the requests with blocks of BLOCK tokens in place of larger ones."""
    small = []
    for request in requests:
        parts = request.block_tokens // BLOCK
        blocks = tuple(
            Fingerprint(block * parts + part) for block in request.blocks for part in range(parts)
        )
        small.append(replace(request, blocks=blocks, block_tokens=BLOCK))
    return small


def modelled(requests: Sequence[Request], model: EngineModel, blocks: int) -> Served:
    """Serve requests with the model."""
    replica = ModelledReplica(model, blocks, block_tokens=BLOCK)
    served = Served({}, {}, {})
    coming = list(reversed(requests))
    while coming or replica.plan:
        if coming and (replica.plan is None or coming[-1].arrival_s < replica.plan.ends_s):
            request = coming.pop()
            replica.arrive(request, request.arrival_s)
            continue
        assert replica.plan is not None
        now_s = replica.plan.ends_s
        result = replica.end_step()
        served.first_token_s |= {done.index: now_s for done in result.first_tokens}
        served.finished_s |= {done.index: now_s for done in result.finished}
    served.hit_tokens = replica.hit_tokens
    served.preemptions = replica.preemptions
    return served


def scheduled_by_vllm(requests: Sequence[Request], model: EngineModel, blocks: int) -> Served:
    """Serve requests with vLLM's scheduler. Its steps take as long as the model says."""
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.outputs import ModelRunnerOutput

    from tests.support.kv_managers import full

    longest = max(request.input_tokens + request.output_tokens for request in requests)
    os.environ["VLLM_ALLOW_LONG_MAX_MODEL_LEN"] = "1"
    scheduler: Any = schedulers.scheduler_of(
        Scheduler,
        full(BLOCK),
        blocks=blocks,
        scheduling_policy="priority",
        async_scheduling=False,
        max_num_batched_tokens=model.chunk_tokens,
        max_num_seqs=model.max_sequences,
        max_model_len=longest + 1,
    )
    served = Served({}, {}, {})
    ids = count(2**40)  # of tokens that no other text has
    coming, now_s = list(reversed(requests)), 0.0
    while coming or scheduler.requests:
        while coming and coming[-1].arrival_s <= now_s:
            scheduler.add_request(_request(coming.pop(), ids))
        if not scheduler.requests:
            now_s = coming[-1].arrival_s
            continue
        planned = scheduler.schedule()
        served.preemptions += len(planned.preempted_req_ids or ())
        computed: dict[str, int] = planned.num_scheduled_tokens
        if computed:
            now_s += _step_s(scheduler, computed, model)
        drawn = []
        for name in computed:
            request = scheduler.requests[name]
            is_complete = request.num_computed_tokens >= request.num_tokens
            drawn.append([next(ids)] if is_complete else [])
            if is_complete and not request.num_output_tokens:
                served.first_token_s[int(name)] = now_s
                served.hit_tokens[int(name)] = request.prefill_stats.num_cached_tokens
        numbers = {name: number for number, name in enumerate(computed)}
        scheduler.update_from_output(planned, ModelRunnerOutput([*computed], numbers, drawn))
        ended = [name for name in computed if name not in scheduler.requests]
        served.finished_s |= {int(name): now_s for name in ended}
    return served


def _request(request: Request, ids: "count[int]") -> Any:
    made = schedulers.request_of(
        str(request.index), tokens=1, first_id=0, max_tokens=request.output_tokens
    )
    tokens = [block * BLOCK + place for block in request.blocks for place in range(BLOCK)]
    tokens += [next(ids) for _ in range(request.input_tokens - len(tokens))]
    return type(made)(
        str(request.index),
        tokens[: request.input_tokens],
        made.sampling_params,
        None,
        arrival_time=request.arrival_s,
        block_hasher=made._block_hasher,
    )


def _step_s(scheduler: Any, computed: dict[str, int], model: EngineModel) -> float:
    """Return the duration of a step, which has been scheduled."""
    seconds = model.base_s(len(computed), sum(computed.values()))
    for name, tokens in computed.items():
        request = scheduler.requests[name]
        start = request.num_computed_tokens - tokens
        if tokens == 1 and request.num_output_tokens:
            seconds += model.context_token_s * (start + 1)
        else:
            seconds += model.prefill.seconds(start, start + tokens)
    return seconds
