"""The requests of a recorded trace, with their arrival times in a replay.

The format is Mooncake's: one JSON object per line with `timestamp` (ms), `input_length` and
`output_length` (tokens) and `hash_ids`, one for each block of the prompt. Ids are chained: equal
ids mean equal prefixes up to that block. Blocks behind the last id are the request's own: no other
request has them. A cluster's own request log (request_log.py) also has the
block size, the requested model, and the time and outcome of each request. A trace may say which
`session` a request belongs to, that its model may call `tools` (or does so: a `tool_call`, or a
`hint` of 1), and that its client says `session_end` with it.
"""

import json
import math
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

from xxhash import xxh3_64_intdigest

from kvroute.blocks.fingerprint import Fingerprint, reusable_blocks

BLOCK_TOKENS = 512  # the default for a trace without a block size: Mooncake's
MOST_TOKENS = 100_000_000  # of a prompt; more is a mistake in the trace
NOT_RUN = ("failed", "refused")  # outcomes of requests that are not replayed
TICK_S = 3.0  # the longest time over which requests with one timestamp are spread


class TraceError(ValueError):
    """The trace cannot be replayed; the message says which line and why."""


@dataclass(frozen=True, slots=True)
class Request:
    index: int  # position in the order of arrival
    arrival_s: float
    input_tokens: int
    output_tokens: int
    blocks: tuple[Fingerprint, ...]  # the prompt's full blocks
    block_tokens: int = BLOCK_TOKENS  # of each block, the same in all requests of a trace
    model: str | None = None  # also the same in all; None when the trace has none
    session: str | None = None  # of which it is a turn
    answered_s: float | None = None  # from its arrival to the answer's end, as recorded
    has_tools: bool = False  # the model may call tools in this session
    is_end: bool = False  # its client says that the session ends with it
    own_blocks: int = 0  # the last of its blocks, for which the trace has no ids

    @property
    def reusable(self) -> tuple[Fingerprint, ...]:
        """The blocks that it can reuse from a cache: never the last token's."""
        return self.blocks[: reusable_blocks(self.input_tokens, self.block_tokens)]


def read(path: Path, *, limit: int | None, seed: int, model: str | None = None) -> list[Request]:
    """The trace's requests in order of arrival, starting at 0 s, at the trace's own speed.

    A folder is the request log of several routers: all its .jsonl files are read.
    model: only requests for this model are read.
    """
    recorded = sorted(_requests(path, model), key=lambda request: request.arrival_s)[:limit]
    if len(recorded) < 2:
        of_model = f" of {model}" if model else ""
        raise TraceError(
            f"{path} holds {len(recorded)} requests{of_model}; a replay needs two at least"
        )
    first_s = recorded[0].arrival_s
    if first_s == recorded[-1].arrival_s:
        raise TraceError(f"{path}: all timestamps are equal; a rate of arrivals needs two")
    times_s = _spread([r.arrival_s - first_s for r in recorded], random.Random(seed))
    with_tools = {request.session for request in recorded if request.has_tools} - {None}
    return [
        replace(
            request,
            index=i,
            arrival_s=time_s,
            has_tools=request.has_tools or request.session in with_tools,
        )
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
        hits.append(known * request.block_tokens)
        seen.update(request.blocks)
    return hits


def unnamed(requests: Sequence[Request]) -> str:
    """Return how much of a trace has no block ids, in words; nothing if all has."""
    lines = sum(request.own_blocks > 0 for request in requests)
    if not lines:
        return ""
    tokens = sum(request.own_blocks * request.block_tokens for request in requests)
    share = tokens / sum(request.input_tokens for request in requests)
    return (
        f"blocks without an id: in {lines:,} of {len(requests):,} requests, {tokens:,} tokens "
        f"({share:.1%} of all); each is taken for a block that no other request has"
    )


def _requests(path: Path, model: str | None) -> Iterator[Request]:
    first: Request | None = None
    for where, line in _lines(path):
        request = _request(where, line)
        if request is None or model not in (None, request.model):
            continue
        first = first or request
        if request.model != first.model:
            raise TraceError(
                f"{where} asked {request.model}, those before it {first.model}; choose with --model"
            )
        if request.block_tokens != first.block_tokens:
            raise TraceError(
                f"{where} has blocks of {request.block_tokens} tokens, those before it "
                f"{first.block_tokens}; make two traces of them"
            )
        yield request


def _lines(path: Path) -> Iterator[tuple[str, str]]:
    """Every line, and its location in words. In a folder, a router may still write the last one."""
    for file in sorted(path.glob("*.jsonl")) if path.is_dir() else [path]:
        with file.open() as lines:
            for number, line in enumerate(lines, 1):
                if path.is_dir() and not line.endswith("\n"):
                    break
                yield f"{file}, line {number}", line


def _request(where: str, line: str) -> Request | None:
    """None for a failed request: it was sent again and has another line, or never ran."""
    try:
        row = json.loads(line)
        input_tokens = int(row["input_length"])
        block_tokens = int(row.get("block_size", BLOCK_TOKENS))
        if not 1 <= input_tokens <= MOST_TOKENS:
            raise ValueError(f"input_length is {input_tokens}; expected 1 to {MOST_TOKENS}")
        least = reusable_blocks(input_tokens, block_tokens)
        ids = row["hash_ids"][: input_tokens // block_tokens]
        request = Request(
            index=0,
            arrival_s=row["timestamp"] / 1000.0,
            input_tokens=input_tokens,
            output_tokens=max(1, int(row["output_length"])),
            blocks=(*_named_blocks(ids), *_own_blocks(where, len(ids), least)),
            block_tokens=block_tokens,
            model=row.get("model"),
            session=None if row.get("session") is None else str(row["session"]),
            answered_s=_answered_s(row),
            has_tools=bool(row.get("tools") or row.get("tool_call") or row.get("hint") == 1),
            is_end=bool(row.get("session_end")),
            own_blocks=max(0, least - len(ids)),
        )
    except (ValueError, TypeError, KeyError, AttributeError, ZeroDivisionError) as error:
        raise TraceError(f"{where} is no request of a Mooncake trace: {error!r}") from None
    return None if row.get("outcome") in NOT_RUN else request


def _named_blocks(ids: Iterable[Any]) -> Iterator[Fingerprint]:
    """Yield the blocks that a line names. Ids start at 0, which means "no block" in the router."""
    for id_ in ids:
        yield Fingerprint(int(id_) + 1)


def _own_blocks(where: str, named: int, least: int) -> Iterator[Fingerprint]:
    """Yield the blocks that a line has tokens but no ids for."""
    for number in range(named, least):
        yield Fingerprint(xxh3_64_intdigest(f"{where}, block {number}".encode()))


def _answered_s(row: dict[str, Any]) -> float | None:
    """From its arrival to the end of its answer, if a cluster has logged it. Raises ValueError."""
    if row.get("duration_s") is None:
        return None
    answered_s = float(row["duration_s"]) + float(row.get("queued_s") or 0.0)
    if not 0.0 <= answered_s < math.inf:
        raise ValueError(f"duration_s and queued_s are {answered_s} together")
    return answered_s


def _spread(times_s: Sequence[float], rng: random.Random) -> list[float]:
    """Spreads requests with the same timestamp uniformly over the time until the next one."""
    ticks = [(time_s, len(list(group))) for time_s, group in groupby(times_s)]
    ends_s = [min(later - time_s, TICK_S) for (time_s, _), (later, _) in pairwise(ticks)]
    spread: list[float] = []
    for (time_s, count), width_s in zip(ticks, [*ends_s, TICK_S], strict=True):
        shares = sorted(rng.random() for _ in range(count)) if count > 1 else [0.0]
        spread += [time_s + width_s * share for share in shares]
    return spread
