"""What vLLM's scheduler leaves in the cache of a request that it preempts; there is no model."""

from typing import Any

import pytest

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(120)]  # vLLM's own

BLOCK = 16
STEP = 4 * BLOCK  # tokens of one prompt that a step computes


def scheduler_of(name: str, *, blocks: int) -> Any:
    """Of kvroute or of vLLM itself, as a replica configures it."""
    import torch
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    from kvroute.process.builtin_model import BUILTIN_MODEL, resolve
    from kvroute.replica.vllm_engine.scheduler import KvrouteScheduler

    config = AsyncEngineArgs(
        model=str(resolve(BUILTIN_MODEL)),
        block_size=BLOCK,
        long_prefill_token_threshold=STEP,
        scheduling_policy="priority",
    ).create_engine_config()
    config.cache_config.num_gpu_blocks = blocks + 1  # one is vLLM's null block
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32)
    cache = KVCacheConfig(blocks + 1, [], [KVCacheGroupSpec(["layer"], spec)])
    kind: Any = {"kvroute": KvrouteScheduler, "vllm": Scheduler}[name]
    return kind(
        *(config, cache, StructuredOutputManager(config)), block_size=BLOCK, hash_block_size=BLOCK
    )


def request_of(name: str, *, tokens: int, first_id: int, priority: int) -> Any:
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256_cbor
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    init_none_hash(sha256_cbor)
    return Request(
        name,
        list(range(first_id, first_id + tokens)),
        SamplingParams(max_tokens=100, ignore_eos=True),
        None,
        priority=priority,
        block_hasher=get_request_block_hasher(BLOCK, sha256_cbor),
    )


def step(scheduler: Any) -> dict[str, int]:
    """Computes a step, with some token for each request whose prompt is done; returns how many
    tokens of each it computed."""
    from vllm.v1.outputs import ModelRunnerOutput

    planned = scheduler.schedule()
    computed: dict[str, int] = planned.num_scheduled_tokens
    requests = [scheduler.requests[name] for name in computed]
    drawn = [[7] if each.num_computed_tokens >= each.num_tokens else [] for each in requests]
    numbers = {name: number for number, name in enumerate(computed)}
    scheduler.update_from_output(planned, ModelRunnerOutput([*computed], numbers, drawn))
    return computed


@pytest.mark.parametrize(
    ("name", "found"),
    # vLLM's own blocks hold nothing there. Once it finds 128, ours need not override it.
    [("kvroute", 2 * STEP), ("vllm", 2 * STEP + 3 * BLOCK)],
)
def test_a_request_that_was_preempted_in_the_step_that_scheduled_it_finds_what_was_computed(
    name: str, found: int
) -> None:
    scheduler = scheduler_of(name, blocks=15)
    long = request_of("long", tokens=200, first_id=0, priority=9)
    scheduler.add_request(request_of("old", tokens=BLOCK, first_id=7000, priority=0))
    scheduler.add_request(long)
    assert step(scheduler) == {"old": BLOCK, "long": STEP}
    scheduler.add_request(request_of("young", tokens=BLOCK, first_id=5000, priority=1))
    assert step(scheduler) == {"old": 1, "long": STEP, "young": BLOCK}
    assert step(scheduler) == {"old": 1, "young": 1}  # it took the long one's last block
    coordinator = scheduler.kv_cache_manager.coordinator
    assert coordinator.find_longest_cache_hit(long.block_hashes, 200)[1] == found
