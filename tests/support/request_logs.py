"""Writes a request log as two replicas would, with the times of a known engine."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvroute.prefill.speed import PrefillModel
from kvroute.replay.hardware.engine_model import EngineModel
from kvroute.replay.simulate import Cluster, simulate
from kvroute.replay.workload.trace import BLOCK_TOKENS, at_speed
from tests.support.conversations import conversations

ENGINE = EngineModel(
    PrefillModel(tokens_per_s=12_000.0, attention_tokens=20_000.0),
    step_s=0.015,
    sequence_s=0.0004,
    context_token_s=0.0,
    chunk_tokens=4096,
    overhead_s=0.03,
)
KV_TOKENS = 200_000
FACTS = {"replicas": 2, "kv_tokens": KV_TOKENS, "step_tokens": 4096, "attention_tokens": 20_000.0}
SPEED = 0.25  # pace of the conversations: the replicas wait now and then, but are not overloaded


def write_log(file: Path, facts: Mapping[str, Any] = FACTS, **changes: Any) -> Path:
    """Write the log of two replicas with ENGINE, each of which has its own conversations.

    Args:
        file: Where to write it.
        facts: What each line says about the replica that answered.
        changes: Fields of each line that replace those of the simulation.
    """
    rows = []
    for number in range(2):
        requests = at_speed(conversations(count=40, turns=4, seed=number), SPEED)
        outcome = simulate(requests, Cluster(1, KV_TOKENS, engine=ENGINE), "round-robin")
        for i, request in enumerate(requests):
            rows.append(
                {
                    "timestamp": 1000 * request.arrival_s,
                    "input_length": request.input_tokens,
                    "output_length": request.output_tokens,
                    "hash_ids": [10**6 * number + block for block in request.blocks],
                    "block_size": BLOCK_TOKENS,
                    "replica": "ab"[number],
                    "cached_tokens": outcome.hit_tokens[i],
                    "ttft_s": outcome.first_token_s[i] - request.arrival_s,
                    "duration_s": outcome.finished_s[i] - request.arrival_s,
                    **facts,
                    **changes,
                }
            )
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return file
