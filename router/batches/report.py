"""What operators see of batches: metrics, and facts for the doctor."""

import time
from typing import Any

from kvroute.batch.usage import Usage
from kvroute.process.exposition import Readings
from kvroute.router.batches.batches import Batches
from kvroute.router.batches.files import Files
from kvroute.router.batches.runner import BatchRunner

MAX_SHOWN = 100  # the most batches in the facts


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
        "Prompt tokens of these lines; cached: from a cache.",
        lambda: _tokens(runner.usage),
    )


async def facts(
    files: Files, batches: Batches, runner: BatchRunner, *, quota_bytes: int
) -> dict[str, Any]:
    """Return the state of the store and of all batches that have not ended. Raises OSError."""
    running = [snapshot for snapshot in await batches.listed(None) if not snapshot.end]
    now_s = time.time()
    return {
        "used_bytes": sum(record.bytes for record in await files.all()),
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


def _tokens(usage: Usage) -> dict[str, float]:
    computed = max(0, usage.prompt_tokens - usage.cached_tokens)
    return {"cached": usage.cached_tokens, "computed": computed}
