"""A made-up state of a fleet, as routers send it to the live page."""

import math
from typing import Any

from kvroute.command.explain import EVICTED, TERMS
from kvroute.features.page.history import PERIOD_S, SAMPLES, History, SampledLoad, sample
from kvroute.features.page.traffic import Counts, Times
from kvroute.router.placement.ledger import CAUSES

NOW_S = 1_800_000_000.0
TOKENS = {"hit": 8_000, "spilled": 300, "new": 1_500, "tail": 200}


def page_state(replicas: int, *, samples: int = SAMPLES) -> dict[str, Any]:
    """Return the whole state, by default with an hour of samples."""
    ids = [f"r{number:07}" for number in range(replicas)]
    return (
        {
            "router": _router(),
            "queue": _queue(),
            "words": {"terms": TERMS, "evicted": EVICTED},
            "figures": [["Sessions with a seat", "12", "of 30; 2 wait", "Seats.", True]],
            "services": [],
            "ledger": {
                "window_s": 300.0,
                "requests": 40,
                "tokens": dict.fromkeys(CAUSES, 0) | TOKENS,
                "evicted": dict.fromkeys(EVICTED, 0),
            },
            "history": _history(ids, samples),
        }
        | {f"replica/{id_}": _replica(id_, number) for number, id_ in enumerate(ids)}
        | {f"decision/{number}": _decision(number, ids) for number in range(12)}
    )


def _router() -> dict[str, Any]:
    return {
        "id": "5f3027aa25a1",
        "routers": 2,
        "model": "SmolLM2-135M-Instruct",
        "policy": "kvroute",
        "block_size": 32,
        "wanted": 7,
        "in_flight": 7,
        "index": {"reachable": True, "age_s": 0.2, "blocks": 2_261},
    }


def _queue() -> dict[str, Any]:
    return {
        "requests": 2,
        "prefill_s": 1.5,
        "oldest_s": 0.4,
        "all_routers": {"requests": 3, "prefill_s": 2.0},
        "recent": {"window_s": 300.0, "refused": {"deadline": 1}},
    }


def _history(ids: list[str], samples: int) -> dict[str, Any]:
    history = History()
    for number in range(samples):
        wave = 1 + math.sin(number / 20)
        sums = (round(20 * wave), 10_000, round(4_000 * wave), 900)
        counts = Counts(*sums, Times(0.02, 0.05 * wave), Times(0.01, 0.02 * wave))
        fleet_load = SampledLoad(round(4 * wave), round(wave), round(3 * wave))
        fleet = sample(counts, fleet_load, elapsed_s=PERIOD_S)
        replica = sample(counts, SampledLoad(round(4 * wave), 0), elapsed_s=PERIOD_S)
        history.add(NOW_S - PERIOD_S * (samples - number), fleet, dict.fromkeys(ids, replica))
    return {"replica": None, "replicas": history.replicas(), "samples": history.of_fleet()}


def _replica(id_: str, number: int) -> dict[str, Any]:
    return {
        "id": id_,
        "state": ("ready", "silent", "degraded", "starting")[number % 4],
        "node": "192.0.2.2",
        "requests": 100 + number,
        "prompt_tokens": 1_000,
        "hit_tokens": 850,
        "capacity_blocks": 400,
        "host_blocks": 0,
        "cached_blocks": 300,
        "used_blocks": 60,
        "pinned_blocks": 20,
        "running": 3,
        "waiting": 1,
    }


def _decision(number: int, ids: list[str]) -> dict[str, Any]:
    outcome = ("ok", "cancelled", "refused", "failed", None)[number % 5]
    return {
        "number": number,
        "at_ms": 1000 * NOW_S,
        "replica": ids[0],
        "of_replicas": len(ids),
        "prompt_tokens": 1_381,
        "expected_tokens": 1_248,
        "cached_tokens": 1_248,
        "host_tokens": 0,
        "disk_tokens": 0,
        "peer_tokens": 0,
        "output_tokens": 20,
        "predicted_ttft_s": 0.02,
        "ttft_s": 0.023,
        "queued_s": 0.4,
        "outcome": outcome,
        "is_resumed": False,
        "continued_at": ids[-1] if outcome == "failed" else None,
        "continued_outcome": "ok" if outcome == "failed" else None,
        "ledger": dict.fromkeys(CAUSES, 0) | {"hit": 1_248, "new": 133},
        "evicted_why": None,
        "receipt": {
            "reason": "it has the most of the prompt cached",
            "choice": ids[0],
            "best_hit_tokens": 1_248,
            "congestion_price": 1.2,
            "broken": None,
            "replicas": [
                {
                    "id": id_,
                    "hit_tokens": 1_248,
                    "backlog_s": 0.1,
                    "prefill_s": 0.02,
                    "unanswered": 2,
                    "cost_s": 0.12,
                    "host_tokens": 0,
                    "reload_s": 0.0,
                    "terms_s": {"waiting": 0.1, "own": 0.02, "rotation": 0.0},
                }
                for id_ in ids[:8]
            ],
        },
    }
