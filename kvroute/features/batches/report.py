"""What operators see of batches: metrics, and facts for the doctor."""

import time
from typing import Any

from kvroute.batch.usage import TokenUsage
from kvroute.features.batches.batches import Batches
from kvroute.features.batches.files import Files
from kvroute.features.batches.runner import BatchRunner
from kvroute.features.figure import Figure
from kvroute.process.exposition import Readings
from kvroute.wording import plural

MAX_SHOWN = 100  # the most batches in the facts
ABOUT = (  # explains the figure
    "Batches that have not ended, of all routers. The time left is that of this router's batches. "
    "kvroute batch list has each batch."
)


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


def figures(runner: BatchRunner) -> list[Figure]:
    """Return how far the batches are that have not ended."""
    unfinished = runner.unfinished
    if not unfinished:
        return []
    runs = [runner.runs.get(snapshot.id) for snapshot in unfinished]
    progress = [
        run.counted() if run else snapshot.progress
        for run, snapshot in zip(runs, unfinished, strict=True)
    ]
    total = sum(snapshot.started.total for snapshot in unfinished if snapshot.started)
    failed = sum(each.failed for each in progress)
    done = sum(each.completed for each in progress) + failed
    prompt_tokens = sum(each.usage.prompt_tokens for each in progress)
    cached_tokens = sum(each.usage.cached_tokens for each in progress)
    left_s = max((run.needed_s for run in runs if run), default=0.0)
    notes = (
        f"{done:,} of {plural(total, 'line')}",
        f"{failed:,} failed" if failed else "",
        f"{cached_tokens / prompt_tokens:.0%} of prompt tokens cached" if prompt_tokens else "",
        f"about {left_s / 60:.0f} min left" if left_s else "",
        *sorted({*runner.paused.values()}),
    )
    note, is_paused = "; ".join(filter(None, notes)), bool(runner.paused)
    return [Figure("Batches", f"{len(unfinished):,}", note, ABOUT, is_paused)]


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
