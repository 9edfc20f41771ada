"""What operators see of batches: metrics, and facts for the doctor."""

import time
from typing import Any

from kvroute.batch.usage import TokenUsage
from kvroute.features.batches.batch_state import Snapshot
from kvroute.features.batches.batches import Batches
from kvroute.features.batches.files import Files
from kvroute.features.batches.runner import BatchRunner
from kvroute.process.exposition import Readings

MAX_SHOWN = 100  # the most batches in the facts
MAX_LIVE = 20  # the most batches on the live page


def export(runner: BatchRunner, readings: Readings) -> None:
    """Export the batches that this router runs as metrics."""
    readings.gauge(
        "kvroute_batches_running", "Batches that this router runs.", lambda: len(runner.runs)
    )
    readings.gauge(
        "kvroute_batches_paused",
        "Batches of this router that wait because files cannot be read or written.",
        lambda: len(runner.paused),
    )
    readings.gauge(
        "kvroute_batch_lines_left",
        "Lines without a result in the batches that this router runs.",
        lambda: sum(run.left for run in [*runner.runs.values()]),
    )
    readings.gauge(
        "kvroute_batch_left_seconds",
        "Time until the last of this router's batches ends, at their present speeds.",
        lambda: max((run.needed_s for run in [*runner.runs.values()]), default=0.0),
    )
    readings.gauge(
        "kvroute_batch_oldest_seconds",
        "Age of the oldest batch that this router runs.",
        lambda: max(
            (time.time() - run.record.created_at for run in [*runner.runs.values()]), default=0.0
        ),
    )
    readings.labelled_counter(
        "result",
        "kvroute_batch_lines",
        "Lines of batches that this router has answered; failed: with an error.",
        lambda: _lines(runner),
    )
    readings.labelled_counter(
        "source",
        "kvroute_batch_prompt_tokens",
        "Prompt tokens of the batch lines that this router has answered; cached: from a cache.",
        lambda: _tokens(runner.usage),
    )


def live(runner: BatchRunner) -> dict[str, Any]:
    """Return the batches that have not ended, for the live page."""
    batches = [_live(snapshot, runner) for snapshot in runner.unfinished[:MAX_LIVE]]
    return {"batches": batches, "others": max(0, len(runner.unfinished) - MAX_LIVE)}


def _live(snapshot: Snapshot, runner: BatchRunner) -> dict[str, Any]:
    run = runner.runs.get(snapshot.id)
    progress = run.counted() if run else snapshot.progress
    return {
        "id": snapshot.id,
        "status": snapshot.status,
        "endpoint": snapshot.record.endpoint,
        "created_at": snapshot.record.created_at,
        "expires_at": snapshot.record.expires_at,
        "total": snapshot.started.total if snapshot.started else None,
        "completed": progress.completed,
        "failed": progress.failed,
        "prompt_tokens": progress.usage.prompt_tokens,
        "cached_tokens": progress.usage.cached_tokens,
        # Only the router that runs the batch knows its speed.
        "needed_s": round(run.needed_s) if run and run.needed_s else None,
        "pause": runner.paused.get(snapshot.id, ""),
    }


async def facts(
    files: Files, batches: Batches, runner: BatchRunner, *, quota_bytes: int
) -> dict[str, Any]:
    """Return the state of the store and of all batches that have not ended. Raises OSError."""
    running = [snapshot for snapshot in await batches.listed(None) if not snapshot.end]
    now_s = time.time()
    return {
        "used_bytes": await files.used_bytes(),
        "quota_bytes": quota_bytes,
        "free_bytes": await files.free_bytes(),
        "running": [
            {
                "id": snapshot.id,
                "status": snapshot.status,
                "still_s": now_s - max(snapshot.record.created_at, snapshot.progress.updated_at),
                "left_s": snapshot.record.expires_at - now_s,
                "pause": runner.paused.get(snapshot.id, ""),
            }
            for snapshot in running[:MAX_SHOWN]
        ],
    }


def _lines(runner: BatchRunner) -> dict[str, float]:
    return {"completed": runner.completed, "failed": runner.failed}


def _tokens(usage: TokenUsage) -> dict[str, float]:
    computed = max(0, usage.prompt_tokens - usage.cached_tokens)
    return {"cached": usage.cached_tokens, "computed": computed}
