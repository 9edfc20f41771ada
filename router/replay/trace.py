"""Requests of a recorded trace, at the times they arrive in a replay.

The format is Mooncake's: one JSON object a line with `timestamp` (ms), `input_length` and
`output_length` (tokens) and `hash_ids`, one for each 512-token block of the prompt. Ids are
chained: an equal id means an equal prefix up to there.
"""

import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, islice, pairwise
from pathlib import Path

from replica.kvindex.fingerprint import Fingerprint, reusable_blocks

BLOCK_TOKENS = 512
TICK_S = 3.0  # the longest time that one timestamp stands for


class TraceError(ValueError):
    """The trace cannot be replayed; the message says which line and why."""


@dataclass(frozen=True, slots=True)
class Request:
    index: int  # position in the order of arrival
    arrival_s: float
    input_tokens: int
    output_tokens: int
    blocks: tuple[Fingerprint, ...]  # the prompt's full blocks

    @property
    def reusable(self) -> tuple[Fingerprint, ...]:
        """The blocks that it could take from a cache: never the last token's."""
        return self.blocks[: reusable_blocks(self.input_tokens, BLOCK_TOKENS)]


def read(path: Path, *, limit: int | None, seed: int) -> list[Request]:
    """The trace's requests in order of arrival, in the trace's own time."""
    with path.open() as lines:
        recorded = [_request(n, line) for n, line in enumerate(islice(lines, limit), 1)]
    if len(recorded) < 2:
        raise TraceError(f"{path} holds {len(recorded)} requests; a replay needs two at least")
    recorded.sort(key=lambda request: request.arrival_s)
    if recorded[0].arrival_s == recorded[-1].arrival_s:
        raise TraceError(f"{path}: all timestamps are equal; a rate of arrivals needs two")
    times_s = _spread([request.arrival_s for request in recorded], random.Random(seed))
    return [
        replace(request, index=i, arrival_s=time_s)
        for i, (request, time_s) in enumerate(zip(recorded, times_s, strict=True))
    ]


def at_speed(requests: Iterable[Request], speed: float) -> list[Request]:
    """The same requests, arriving `speed` times as fast."""
    return [replace(request, arrival_s=request.arrival_s / speed) for request in requests]


def native_rps(recorded: Sequence[Request]) -> float:
    """Requests a second in the trace's own time."""
    return len(recorded) / span_s(recorded)


def span_s(requests: Sequence[Request]) -> float:
    """From the first arrival to the last."""
    return requests[-1].arrival_s - requests[0].arrival_s


def ideal_hit_tokens(requests: Iterable[Request]) -> list[int]:
    """What each request would find in one shared cache that forgets nothing."""
    seen: set[Fingerprint] = set()
    hits = []
    for request in requests:
        reusable = request.reusable
        known = next((i for i, block in enumerate(reusable) if block not in seen), len(reusable))
        hits.append(known * BLOCK_TOKENS)
        seen.update(request.blocks)
    return hits


def _request(number: int, line: str) -> Request:
    try:
        row = json.loads(line)
        input_tokens = int(row["input_length"])
        full = input_tokens // BLOCK_TOKENS
        # Ids count from 0 there, and 0 stands for "no block" in the router.
        blocks = tuple(Fingerprint(int(id_) + 1) for id_ in row["hash_ids"][:full])
        request = Request(
            index=number,
            arrival_s=row["timestamp"] / 1000.0,
            input_tokens=input_tokens,
            output_tokens=max(1, int(row["output_length"])),
            blocks=blocks,
        )
    except (ValueError, TypeError, KeyError) as error:
        raise TraceError(f"line {number} is no request of a Mooncake trace: {error!r}") from None
    if input_tokens < 1 or len(blocks) < full:
        raise TraceError(
            f"line {number}: {input_tokens} tokens are {full} full blocks, but it has {len(blocks)}"
        )
    return request


def _spread(times_s: Sequence[float], rng: random.Random) -> list[float]:
    """Requests that share a timestamp, uniformly over the time until the next one."""
    ticks = [(time_s, len(list(group))) for time_s, group in groupby(times_s)]
    ends_s = [min(later - time_s, TICK_S) for (time_s, _), (later, _) in pairwise(ticks)]
    spread: list[float] = []
    for (time_s, count), width_s in zip(ticks, [*ends_s, TICK_S], strict=True):
        shares = sorted(rng.random() for _ in range(count)) if count > 1 else [0.0]
        spread += [time_s + width_s * share for share in shares]
    return spread
