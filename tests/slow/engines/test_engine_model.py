"""The model of an engine schedules as vLLM's own scheduler does, on the same clock."""

import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from kvroute.command.replay_command import EXAMPLE_TRACE
from kvroute.replay.hardware.profiles import PROFILES
from kvroute.replay.workload.published_shapes import SHAPES
from kvroute.replay.workload.trace import Request, at_speed, read
from tests.support.conversations import conversations
from tests.support.vllm_model import Served, modelled, scheduled_by_vllm, with_small_blocks

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own

ENGINE = PROFILES["h100-70b-tp4"].engine()


def shape(name: str, count: int, speed: float) -> list[Request]:
    """Return requests of a shape that arrive `speed` times a second."""
    return at_speed(SHAPES[name](count, random.Random(0)), speed)


def workload(name: str) -> tuple[list[Request], int, bool]:
    """Return requests, the blocks of the engine's cache, and whether these are too few."""
    match name:
        case "chats":
            return with_small_blocks(conversations(count=30)), 6000, False
        case "example":
            return with_small_blocks(read(EXAMPLE_TRACE, limit=300, seed=0)), 6000, False
        case "shared-prefix":
            return shape("shared-prefix", 250, speed=8.0), 5000, True
    long = [replace(each, output_tokens=2000) for each in shape("reasoning", 120, speed=4.0)]
    return long, 6000, True


@pytest.mark.parametrize("name", ["chats", "example", "shared-prefix", "reasoning"])
def test_the_model_admits_caches_and_preempts_as_vllm_does(name: str) -> None:
    requests, blocks, is_tight = workload(name)
    model = modelled(requests, ENGINE, blocks)
    vllm = scheduled_by_vllm(requests, ENGINE, blocks)
    assert len(model.finished_s) == len(vllm.finished_s) == len(requests)
    assert model.hit_tokens == vllm.hit_tokens
    assert (vllm.preemptions > 20) is is_tight
    assert model.preemptions == pytest.approx(vllm.preemptions, rel=0.02)
    percentiles = [np.percentile(first_tokens(requests, each), [50, 90]) for each in (model, vllm)]
    assert percentiles[0] == pytest.approx(percentiles[1], rel=0.02)


def first_tokens(requests: Sequence[Request], served: Served) -> list[float]:
    """Return the seconds that each request waited for its first token."""
    return [served.first_token_s[each.index] - each.arrival_s for each in requests]
