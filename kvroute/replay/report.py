"""A replay's results for a policy: hits, latencies, throughput and balance."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
from rich.table import Table

from kvroute.replay.simulate import Outcome
from kvroute.replay.trace import Request, ideal_hit_tokens, span_s

WARM_UP = 10  # the first tenth of the requests fills the caches and is not measured

COLUMNS = (  # heading, field of Summary, format
    ("policy", "policy", "{}"),
    ("hits", "hit_share", "{:.3f}"),
    ("of ideal", "ideal_share", "{:.1%}"),
    ("TTFT p50", "ttft_p50_s", "{:.2f}"),
    ("p90", "ttft_p90_s", "{:.2f}"),
    ("p99", "ttft_p99_s", "{:.2f}"),
    ("TPOT p90", "tpot_p90_ms", "{:.0f}"),
    ("req/s", "throughput_rps", "{:.1f}"),
    ("imbalance", "imbalance", "{:.2f}"),
)


@dataclass(frozen=True, slots=True)
class Summary:
    policy: str
    hit_share: float  # of the prompt tokens
    ideal_share: float  # of the hits with one shared, unlimited cache
    ttft_p50_s: float
    ttft_p90_s: float
    ttft_p99_s: float
    tpot_p90_ms: float  # between two tokens of a response
    throughput_rps: float  # first tokens a second, while requests arrive
    imbalance: float  # prefill seconds of the busiest replica, over the mean

    def row(self) -> dict[str, str | float]:
        return asdict(self)


def summarise(policy: str, requests: Sequence[Request], outcome: Outcome) -> Summary:
    measured = slice(len(requests) // WARM_UP, None)
    input_tokens = sum(request.input_tokens for request in requests[measured])
    hit_tokens = sum(outcome.hit_tokens[measured])
    ideal_tokens = sum(ideal_hit_tokens(requests)[measured])
    first_s = np.array(outcome.first_token_s)
    ttft_s = first_s - [request.arrival_s for request in requests]
    p50_s, p90_s, p99_s = np.percentile(ttft_s[measured], [50, 90, 99])
    return Summary(
        policy=policy,
        hit_share=hit_tokens / input_tokens,
        ideal_share=hit_tokens / ideal_tokens if ideal_tokens else 1.0,
        ttft_p50_s=float(p50_s),
        ttft_p90_s=float(p90_s),
        ttft_p99_s=float(p99_s),
        tpot_p90_ms=_tpot_p90_ms(requests[measured], outcome, measured),
        throughput_rps=throughput_rps(requests, outcome),
        imbalance=max(outcome.prefill_s) * len(outcome.prefill_s) / sum(outcome.prefill_s),
    )


def throughput_rps(requests: Sequence[Request], outcome: Outcome) -> float:
    """First tokens a second, from the first arrival to the last."""
    in_time = sum(time_s <= requests[-1].arrival_s for time_s in outcome.first_token_s)
    return in_time / span_s(requests)


def table(summaries: Sequence[Summary]) -> Table:
    shown = Table(box=None, padding=(0, 1), pad_edge=False, collapse_padding=True)
    for heading, name, _ in COLUMNS:
        shown.add_column(heading, justify="left" if name == "policy" else "right", no_wrap=True)
    for summary in summaries:
        row = summary.row()
        shown.add_row(*(form.format(row[name]) for _, name, form in COLUMNS))
    return shown


def _tpot_p90_ms(requests: Sequence[Request], outcome: Outcome, measured: slice) -> float:
    decode_s = np.array(outcome.finished_s)[measured] - np.array(outcome.first_token_s)[measured]
    tokens = np.array([request.output_tokens - 1 for request in requests])
    several = tokens > 0
    if not several.any():
        return 0.0
    return float(np.percentile(1000 * decode_s[several] / tokens[several], 90))
