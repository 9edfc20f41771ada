"""The results of a replay for each policy: hits, latencies, throughput and balance."""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvroute.replay.simulate import Outcome
from kvroute.replay.workload.closed_loop import OPEN_LOOP, Loop
from kvroute.replay.workload.trace import Request, ideal_hit_tokens

WARM_UP = 10  # the first 1/WARM_UP of the requests only fill the caches and are not measured
SIZE_LIMITS = (0.0, 4_000, 16_000, 48_000, math.inf)  # limits of the prompt classes, in tokens

SHARE_ENDED = 0.9  # most_sessions_s is the time until this share of the sessions has ended

MEASURED = "measured"  # name of the row with what a cluster has measured, instead of a policy
BEST, NOISE = "*", "~"  # marks: the best value, and values that differ from it only by noise
HIGH, LOW = 1, -1  # values of SummaryColumn.best: the highest or the lowest value is the best

Floats = NDArray[np.float64]


class SummaryColumn(NamedTuple):
    """A column of the report."""

    heading: str  # has the unit, and may have two lines
    field: str  # name of the field of Summary
    form: str = "{}"  # format string for the values
    best: int = 0  # HIGH or LOW; 0: no value is better than another


POLICY = SummaryColumn("policy", "policy")
COLUMNS: Sequence[SummaryColumn] = (
    POLICY,
    SummaryColumn("hit\nshare", "hit_share", "{:.3f}", HIGH),
    SummaryColumn("of\nideal", "ideal_share", "{:.0%}", HIGH),
    SummaryColumn("TTFT\np50, s", "ttft_p50_s", "{:.2f}", LOW),
    SummaryColumn("TTFT\np90, s", "ttft_p90_s", "{:.2f}", LOW),
    SummaryColumn("TTFT\np99, s", "ttft_p99_s", "{:.2f}", LOW),
    SummaryColumn("TPOT\np90, ms", "tpot_p90_ms", "{:.0f}", LOW),
    SummaryColumn("requests\n/s", "throughput_rps", "{:.1f}", HIGH),
    SummaryColumn("prompt\ntokens/s", "prompt_tokens_per_s", "{:,.0f}", HIGH),
)
TOKEN_COLUMNS: Sequence[SummaryColumn] = (
    POLICY,
    SummaryColumn("time between\ntokens p50, ms", "itl_p50_ms", "{:.0f}", LOW),
    SummaryColumn("\np90, ms", "itl_p90_ms", "{:.0f}", LOW),
    SummaryColumn("\np99, ms", "itl_p99_ms", "{:.0f}", LOW),
    SummaryColumn("preempted", "preemptions", "{:,}", LOW),
    SummaryColumn("requests\nwithin --slo", "goodput", "{:.1%}", HIGH),
)
SESSION_COLUMNS: Sequence[SummaryColumn] = (
    POLICY,
    SummaryColumn("session\nmean, s", "session_mean_s", "{:.1f}", LOW),
    SummaryColumn("session\np50, s", "session_p50_s", "{:.1f}", LOW),
    SummaryColumn("session\np90, s", "session_p90_s", "{:.1f}", LOW),
    SummaryColumn("90% done\nafter, s", "most_sessions_s", "{:.1f}", LOW),
    SummaryColumn("turns\n/min", "turns_per_min", "{:.1f}", HIGH),
)
SLOWDOWN_COLUMNS: Sequence[SummaryColumn] = (
    POLICY,
    SummaryColumn("slowdown\np50", "slowdown_p50", "{:.2f}", LOW),
    SummaryColumn("slowdown\np90", "slowdown_p90", "{:.2f}", LOW),
    SummaryColumn("slowdown\np99", "slowdown_p99", "{:.2f}", LOW),
)
MORE_COLUMNS: Sequence[SummaryColumn] = (
    POLICY,
    SummaryColumn("busiest replica\n/ mean", "imbalance", "{:.2f}", LOW),
    SummaryColumn("TTFT p90, s\nunder 4k", "ttft_p90_under_4k_s", "{:.2f}", LOW),
    SummaryColumn("TTFT p90, s\n4k to 16k", "ttft_p90_4k_16k_s", "{:.2f}", LOW),
    SummaryColumn("TTFT p90, s\n16k to 48k", "ttft_p90_16k_48k_s", "{:.2f}", LOW),
    SummaryColumn("TTFT p90, s\nover 48k", "ttft_p90_over_48k_s", "{:.2f}", LOW),
)
TIER_COLUMNS: Sequence[SummaryColumn] = (
    POLICY,
    SummaryColumn("hit share\nin GPU memory", "gpu_hit_share", "{:.3f}"),
    SummaryColumn("hit share\nin host memory", "host_hit_share", "{:.3f}"),
    SummaryColumn("hit share\non disk", "disk_hit_share", "{:.3f}"),
    SummaryColumn("reloads\nin all, s", "reload_s", "{:.1f}"),
    SummaryColumn("wait for\na reload, ms", "reload_wait_ms", "{:.0f}", LOW),
)


@dataclass(frozen=True, slots=True)
class SessionTimes:
    """Figures of all sessions of a replay; None in an open loop, which has no sessions."""

    sessions: int | None = None
    session_mean_s: float | None = None  # from a session's first arrival to its last token
    session_p50_s: float | None = None
    session_p90_s: float | None = None
    slowdown_p50: float | None = None  # duration relative to the duration on an idle replica
    slowdown_p90: float | None = None
    slowdown_p99: float | None = None
    turns_per_min: float | None = None  # answered turns, before the number of sessions falls
    most_sessions_s: float | None = None  # from the first arrival until 90% of sessions have ended


class Slo(NamedTuple):
    """Limits of a request's times, which users of the fleet expect."""

    ttft_s: float = math.inf
    tpot_s: float = math.inf  # mean time between two tokens of an answer


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures of one policy."""

    policy: str
    hit_share: float  # share of the prompt tokens that were cached
    ideal_share: float  # hits, as a share of the hits that one shared, unlimited cache would have
    ttft_p50_s: float
    ttft_p90_s: float
    ttft_p99_s: float
    tpot_p90_ms: float  # 90th percentile of an answer's mean time between two tokens
    # Percentiles of the time between two tokens, over the tokens of all answers; None: unknown.
    itl_p50_ms: float | None
    itl_p90_ms: float | None
    itl_p99_ms: float | None
    preemptions: int  # how often an engine preempted a request for lack of blocks
    goodput: float | None  # share of the requests within the limits of --slo; None: no limits
    # Requests per second that got their first token before the last request arrived.
    throughput_rps: float
    # Prompt tokens of the requests in throughput_rps, per second, cached tokens included.
    prompt_tokens_per_s: float
    imbalance: float  # prefill time of the busiest replica, as a multiple of the mean
    # 90th percentile of the TTFT for a class of prompt size; None if there are no such prompts.
    ttft_p90_under_4k_s: float | None
    ttft_p90_4k_16k_s: float | None
    ttft_p90_16k_48k_s: float | None
    ttft_p90_over_48k_s: float | None
    gpu_hit_share: float  # part of hit_share that was in GPU memory
    host_hit_share: float  # part of hit_share that was in host memory, but not in GPU memory
    disk_hit_share: float  # part of hit_share that was only on disk
    reload_s: float  # total time that the replicas spent on copies from slower tiers
    reload_wait_ms: float  # mean wait for a copy, over the requests that needed one
    session_times: SessionTimes

    def row(self) -> dict[str, str | float | None]:
        """Return all figures by name, including the figures of sessions."""
        row = asdict(self)
        times: dict[str, str | float | None] = row.pop("session_times")
        return row | times


def session_times(loop: Loop, outcome: Outcome) -> SessionTimes:
    """Return the figures of a replay's sessions. Durations include the users' thinking times."""
    if not loop.sessions:
        return SessionTimes()
    starts_s = np.array([outcome.arrival_s[session.turns[0]] for session in loop.sessions])
    ends_s = np.array([outcome.finished_s[session.turns[-1]] for session in loop.sessions])
    alone_s = np.array([session.alone_s for session in loop.sessions])
    durations_s = ends_s - starts_s
    p50_s, p90_s = np.percentile(durations_s, [50, 90])
    slow_p50, slow_p90, slow_p99 = np.percentile(durations_s / alone_s, [50, 90, 99])
    first_start_s = starts_s.min()
    full_until_s = ends_s[ends_s >= starts_s.max()].min()  # first end after the last start
    turns = int((np.array(outcome.finished_s) <= full_until_s).sum())
    return SessionTimes(
        len(loop.sessions),
        session_mean_s=float(durations_s.mean()),
        session_p50_s=float(p50_s),
        session_p90_s=float(p90_s),
        slowdown_p50=float(slow_p50),
        slowdown_p90=float(slow_p90),
        slowdown_p99=float(slow_p99),
        turns_per_min=60 * turns / float(full_until_s - first_start_s),
        most_sessions_s=float(np.quantile(ends_s, SHARE_ENDED) - first_start_s),
    )


def measured_part(requests: Sequence[Request]) -> slice:
    """Return the range of measured requests; the requests before it only fill the caches."""
    return slice(len(requests) // WARM_UP, None)


def summarise(
    policy: str,
    requests: Sequence[Request],
    outcome: Outcome,
    loop: Loop = OPEN_LOOP,
    slo: Slo | None = None,
) -> Summary:
    """Return the figures of one policy."""
    measured = measured_part(requests)
    input_tokens = np.array([request.input_tokens for request in requests], dtype=float)
    hit_tokens = sum(outcome.hit_tokens[measured])
    reloaded_tokens = sum(outcome.reloaded_tokens[measured])
    waits_s = [wait_s for wait_s in outcome.reload_wait_s[measured] if wait_s]
    disk_tokens = sum(outcome.disk_tokens[measured])
    prompt_tokens = float(input_tokens[measured].sum())
    ideal_tokens = sum(ideal_hit_tokens(requests)[measured])
    arrival_s, first_s = np.array(outcome.arrival_s), np.array(outcome.first_token_s)
    ttft_s = (first_s - arrival_s)[measured]
    p50_s, p90_s, p99_s = np.percentile(ttft_s, [50, 90, 99])
    tpot_s = _tpot_s(requests[measured], outcome, measured)
    itl_s = outcome.gaps.percentiles_s(0.5, 0.9, 0.99) if outcome.gaps else (None,) * 3
    span_s = float(arrival_s.max() - arrival_s.min())
    in_time = first_s <= arrival_s.max()
    return Summary(
        policy,
        hit_share=hit_tokens / prompt_tokens,
        ideal_share=hit_tokens / ideal_tokens if ideal_tokens else 1.0,
        ttft_p50_s=float(p50_s),
        ttft_p90_s=float(p90_s),
        ttft_p99_s=float(p99_s),
        tpot_p90_ms=1000 * float(np.percentile(tpot_s[tpot_s > 0.0], 90)) if tpot_s.any() else 0.0,
        **dict(zip(("itl_p50_ms", "itl_p90_ms", "itl_p99_ms"), map(_ms, itl_s), strict=True)),
        preemptions=outcome.preemptions,
        goodput=slo and float(((ttft_s <= slo.ttft_s) & (tpot_s <= slo.tpot_s)).mean()),
        throughput_rps=int(in_time.sum()) / span_s,
        prompt_tokens_per_s=float(input_tokens[in_time].sum()) / span_s,
        imbalance=max(outcome.prefill_s) * len(outcome.prefill_s) / sum(outcome.prefill_s),
        **dict(zip(_SIZE_FIELDS, _p90_by_size_s(input_tokens[measured], ttft_s), strict=True)),
        gpu_hit_share=(hit_tokens - reloaded_tokens) / prompt_tokens,
        host_hit_share=(reloaded_tokens - disk_tokens) / prompt_tokens,
        disk_hit_share=disk_tokens / prompt_tokens,
        reload_s=sum(outcome.reload_s),
        reload_wait_ms=1000 * sum(waits_s) / len(waits_s) if waits_s else 0.0,
        session_times=session_times(loop, outcome),
    )


@dataclass(frozen=True, slots=True)
class ReportTable:
    """A table of the report. The first column has the policies, all others have numbers."""

    headings: list[str]
    rows: list[list[str]]


def tables(
    summaries: Sequence[Summary], ties: Mapping[str, Collection[str]] | None = None
) -> Iterator[ReportTable]:
    """Yield the tables of the report.

    The first table is about requests, the second one about the tokens of answers. In a closed loop,
    tables about sessions follow. The next table has balance and TTFT by prompt size. If slower
    tiers were used, the last table has hits by tier.

    Args:
        summaries: The results of each policy.
        ties: Field of Summary -> policies whose difference to the best policy is noise.
    """
    ties = ties or {}
    yield _table(summaries, COLUMNS, ties)
    has_slo = any(summary.goodput is not None for summary in summaries)
    yield _table(summaries, TOKEN_COLUMNS if has_slo else TOKEN_COLUMNS[:-1], ties)
    if any(summary.session_times.sessions for summary in summaries):
        yield _table(summaries, SESSION_COLUMNS, ties)
        yield _table(summaries, SLOWDOWN_COLUMNS, ties)
    yield _table(summaries, MORE_COLUMNS, ties)
    if any(summary.reload_s for summary in summaries):
        is_disk_used = any(summary.disk_hit_share for summary in summaries)
        columns = [each for each in TIER_COLUMNS if is_disk_used or each.field != "disk_hit_share"]
        yield _table(summaries, columns, ties)


def ties_shown(
    summaries: Sequence[Summary], ties: Mapping[str, Mapping[str, float]]
) -> dict[str, float]:
    """Return the ties of the first table by column, without those that look equal in it.

    Args:
        summaries: The results of each policy.
        ties: The result of noise.ties.

    Returns:
        Heading of a column without its unit -> the largest number in its ties: how many times as
        many requests would show all its differences.
    """
    rows = [summary.row() for summary in summaries if summary.policy != MEASURED]
    shown = {}
    for column in COLUMNS:
        texts = {
            row["policy"]: text for row, text in zip(rows, _cells(column, rows, ()), strict=True)
        }
        times = [
            times
            for policy, times in ties.get(column.field, {}).items()
            if not texts[policy].startswith(BEST)
        ]
        if times:
            shown[" ".join(column.heading.split(",")[0].split())] = max(times)
    return shown


def _table(
    summaries: Sequence[Summary],
    columns: Sequence[SummaryColumn],
    ties: Mapping[str, Collection[str]],
) -> ReportTable:
    rows = [summary.row() for summary in summaries]
    cells = [_cells(column, rows, ties.get(column.field, ())) for column in columns]
    return ReportTable(
        [column.heading for column in columns], [[*row] for row in zip(*cells, strict=True)]
    )


def _cells(
    column: SummaryColumn, rows: Sequence[Mapping[str, Any]], tied: Collection[str]
) -> Iterator[str]:
    """Yield the cells of a column; with several policies, mark the best value and its ties.

    What a cluster has measured gets no mark, since it is no policy.

    Args:
        column: The column.
        rows: The figures of each policy.
        tied: Policies whose value differs from the best one only by noise.
    """
    values = [row[column.field] for row in rows]
    texts = ["-" if value is None else column.form.format(value) for value in values]
    modelled = [row for row in rows if row["policy"] != MEASURED]
    numbers = [row[column.field] for row in modelled if row[column.field] is not None]
    best = ""
    if column.best and len(modelled) > 1 and numbers:
        best = texts[values.index(max(numbers, key=lambda value: column.best * float(value)))]
    for text, row in zip(texts, rows, strict=True):
        mark = BEST if text == best else NOISE if row["policy"] in tied else ""
        yield text if row["policy"] == MEASURED else f"{mark}{text}"


_SIZE_FIELDS = [column.field for column in MORE_COLUMNS[2:]]


def _p90_by_size_s(input_tokens: Floats, ttft_s: Floats) -> list[float | None]:
    groups = np.digitize(input_tokens, SIZE_LIMITS)
    by_size = [ttft_s[groups == group] for group in range(1, len(SIZE_LIMITS))]
    return [float(np.percentile(times_s, 90)) if times_s.size else None for times_s in by_size]


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1000 * seconds


def _tpot_s(requests: Sequence[Request], outcome: Outcome, measured: slice) -> Floats:
    """Return each answer's mean time between two tokens; 0 for answers of one token."""
    decode_s = np.array(outcome.finished_s)[measured] - np.array(outcome.first_token_s)[measured]
    gaps = np.array([request.output_tokens - 1 for request in requests])
    return np.where(gaps > 0, decode_s / np.maximum(gaps, 1), 0.0)
