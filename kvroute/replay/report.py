"""A replay's results for a policy: hits, latencies, throughput and balance."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray
from rich.table import Table

from kvroute.replay.session_times import SessionTimes, session_times
from kvroute.replay.simulate import Outcome
from kvroute.replay.workload.closed_loop import OPEN_LOOP, Loop
from kvroute.replay.workload.trace import Request, ideal_hit_tokens

WARM_UP = 10  # one request in WARM_UP, the first ones, fills the caches and is not measured
SIZE_LIMITS = (0.0, 4_000, 16_000, 48_000, math.inf)  # limits of the prompt sizes, in tokens

Column = tuple[str, str, str]  # heading, field of Summary, format
Floats = NDArray[np.float64]

COLUMNS: Sequence[Column] = (
    ("policy", "policy", "{}"),
    ("hits", "hit_share", "{:.3f}"),
    ("of ideal", "ideal_share", "{:.1%}"),
    ("TTFT p50", "ttft_p50_s", "{:.2f}"),
    ("p90", "ttft_p90_s", "{:.2f}"),
    ("p99", "ttft_p99_s", "{:.2f}"),
    ("TPOT p90", "tpot_p90_ms", "{:.0f}"),
    ("req/s", "throughput_rps", "{:.1f}"),
    ("tokens/s", "prompt_tokens_per_s", "{:,.0f}"),
)
SESSION_COLUMNS: Sequence[Column] = (
    ("policy", "policy", "{}"),
    ("session mean, s", "session_mean_s", "{:.1f}"),
    ("p50", "session_p50_s", "{:.1f}"),
    ("p90", "session_p90_s", "{:.1f}"),
    ("90% done, s", "most_sessions_s", "{:.1f}"),
    ("turns/min", "turns_per_min", "{:.1f}"),
)
SLOWDOWN_COLUMNS: Sequence[Column] = (
    ("policy", "policy", "{}"),
    ("slowdown p50", "slowdown_p50", "{:.2f}"),
    ("p90", "slowdown_p90", "{:.2f}"),
    ("p99", "slowdown_p99", "{:.2f}"),
)
MORE_COLUMNS: Sequence[Column] = (
    ("policy", "policy", "{}"),
    ("imbalance", "imbalance", "{:.2f}"),
    ("TTFT p90 under 4k", "ttft_p90_under_4k_s", "{:.2f}"),
    ("4k-16k", "ttft_p90_4k_16k_s", "{:.2f}"),
    ("16k-48k", "ttft_p90_16k_48k_s", "{:.2f}"),
    ("over 48k tokens", "ttft_p90_over_48k_s", "{:.2f}"),
)
HOST_COLUMNS: Sequence[Column] = (
    ("policy", "policy", "{}"),
    ("hits in GPU memory", "gpu_hit_share", "{:.3f}"),
    ("in host memory", "host_hit_share", "{:.3f}"),
    ("reloads, s", "reload_s", "{:.1f}"),
    ("wait for one, ms", "reload_wait_ms", "{:.0f}"),
)


@dataclass(frozen=True, slots=True)
class Summary:
    policy: str
    hit_share: float  # share of the prompt tokens that were cached
    ideal_share: float  # hits as a share of those with one shared, unlimited cache
    ttft_p50_s: float
    ttft_p90_s: float
    ttft_p99_s: float
    tpot_p90_ms: float  # time between two tokens of a response
    throughput_rps: float  # first tokens per second until the last request arrives
    prompt_tokens_per_s: float  # prompt tokens of these requests per second, cached ones included
    imbalance: float  # prefill time of the busiest replica, as a multiple of the mean
    # 90th percentile of the TTFT by prompt size; None without prompts of that size.
    ttft_p90_under_4k_s: float | None
    ttft_p90_4k_16k_s: float | None
    ttft_p90_16k_48k_s: float | None
    ttft_p90_over_48k_s: float | None
    gpu_hit_share: float  # part of hit_share that was in GPU memory
    host_hit_share: float  # part of hit_share that was in host memory only
    reload_s: float  # seconds that all replicas spent on copies from host memory
    reload_wait_ms: float  # mean wait for a copy, of requests that had one
    session_times: SessionTimes

    def row(self) -> dict[str, str | float | None]:
        """Return all figures by name, including those of sessions."""
        row = asdict(self)
        times: dict[str, str | float | None] = row.pop("session_times")
        return row | times


def summarise(
    policy: str, requests: Sequence[Request], outcome: Outcome, loop: Loop = OPEN_LOOP
) -> Summary:
    measured = slice(len(requests) // WARM_UP, None)
    input_tokens = np.array([request.input_tokens for request in requests], dtype=float)
    hit_tokens = sum(outcome.hit_tokens[measured])
    reloaded_tokens = sum(outcome.reloaded_tokens[measured])
    waits_s = [wait_s for wait_s in outcome.reload_wait_s[measured] if wait_s]
    ideal_tokens = sum(ideal_hit_tokens(requests)[measured])
    arrival_s, first_s = np.array(outcome.arrival_s), np.array(outcome.first_token_s)
    ttft_s = (first_s - arrival_s)[measured]
    p50_s, p90_s, p99_s = np.percentile(ttft_s, [50, 90, 99])
    span_s = float(arrival_s.max() - arrival_s.min())
    in_time = first_s <= arrival_s.max()
    return Summary(
        policy,
        hit_share=hit_tokens / float(input_tokens[measured].sum()),
        ideal_share=hit_tokens / ideal_tokens if ideal_tokens else 1.0,
        ttft_p50_s=float(p50_s),
        ttft_p90_s=float(p90_s),
        ttft_p99_s=float(p99_s),
        tpot_p90_ms=_tpot_p90_ms(requests[measured], outcome, measured),
        throughput_rps=int(in_time.sum()) / span_s,
        prompt_tokens_per_s=float(input_tokens[in_time].sum()) / span_s,
        imbalance=max(outcome.prefill_s) * len(outcome.prefill_s) / sum(outcome.prefill_s),
        **dict(zip(_SIZE_FIELDS, _p90_by_size_s(input_tokens[measured], ttft_s), strict=True)),
        gpu_hit_share=(hit_tokens - reloaded_tokens) / float(input_tokens[measured].sum()),
        host_hit_share=reloaded_tokens / float(input_tokens[measured].sum()),
        reload_s=sum(outcome.reload_s),
        reload_wait_ms=1000 * sum(waits_s) / len(waits_s) if waits_s else 0.0,
        session_times=session_times(loop, outcome),
    )


def tables(summaries: Sequence[Summary]) -> Iterator[Table]:
    """Yield the tables with the results.

    The first is about requests. In a closed loop, tables about sessions follow. Then come balance
    and TTFT by prompt size, and, if host memory was used, hits by tier.
    """
    yield _table(summaries, COLUMNS)
    if any(summary.session_times.sessions for summary in summaries):
        yield _table(summaries, SESSION_COLUMNS)
        yield _table(summaries, SLOWDOWN_COLUMNS)
    yield _table(summaries, MORE_COLUMNS)
    if any(summary.reload_s for summary in summaries):
        yield _table(summaries, HOST_COLUMNS)


def _table(summaries: Sequence[Summary], columns: Sequence[Column]) -> Table:
    shown = Table(box=None, padding=(0, 1), pad_edge=False, collapse_padding=True)
    for heading, name, _ in columns:
        shown.add_column(heading, justify="left" if name == "policy" else "right", no_wrap=True)
    for summary in summaries:
        row = summary.row()
        shown.add_row(
            *("-" if row[name] is None else form.format(row[name]) for _, name, form in columns)
        )
    return shown


_SIZE_FIELDS = [name for _, name, _ in MORE_COLUMNS[2:]]


def _p90_by_size_s(input_tokens: Floats, ttft_s: Floats) -> list[float | None]:
    groups = np.digitize(input_tokens, SIZE_LIMITS)
    by_size = [ttft_s[groups == group] for group in range(1, len(SIZE_LIMITS))]
    return [float(np.percentile(times_s, 90)) if times_s.size else None for times_s in by_size]


def _tpot_p90_ms(requests: Sequence[Request], outcome: Outcome, measured: slice) -> float:
    decode_s = np.array(outcome.finished_s)[measured] - np.array(outcome.first_token_s)[measured]
    tokens = np.array([request.output_tokens - 1 for request in requests])
    several = tokens > 0
    if not several.any():
        return 0.0
    return float(np.percentile(1000 * decode_s[several] / tokens[several], 90))
