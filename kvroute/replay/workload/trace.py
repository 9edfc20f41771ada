"""Reads the requests of a recorded trace.

The format is Mooncake's: one JSON object per line with `timestamp` (ms), `input_length` and
`output_length` (tokens), and `hash_ids` with an id for each block of the prompt. Ids are chained:
equal ids mean equal prefixes up to and with that block. If there are more blocks than ids, no other
request has the blocks without an id. A cluster's request log (request_log.py) also has the block
size, the requested model, and the times and outcome of each request (measured.py). Optional fields
are:

- `session`: the session of the request.
- `tools`: true if the model may call tools. `tool_call`, or a `hint` of 1, means the same.
- `session_end`: true if the client sent the hint that the session ends.
- `priority`: the priority class if it is not `default`. `batch` requests give way to others.
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
from kvroute.replay.workload.measured import Measured, measured
from kvroute.wording import plural

BLOCK_TOKENS = 512  # block size of a trace that does not have it, as in Mooncake's traces
MAX_TOKENS = 100_000_000  # maximum length of a prompt; a longer one is a mistake in the trace
NOT_RUN = ("failed", "refused")  # outcomes of requests that are not replayed
TICK_S = 3.0  # maximum seconds over which requests with equal timestamps are spread


class TraceError(ValueError):
    """The trace cannot be replayed. The message has the line and the reason."""


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a trace."""

    index: int  # position in the order of arrival
    arrival_s: float
    input_tokens: int
    output_tokens: int
    blocks: tuple[Fingerprint, ...]  # the prompt's full blocks
    block_tokens: int = BLOCK_TOKENS  # tokens per block, equal in all requests of a trace
    model: str | None = None  # model, equal in all requests; None if the trace has no models
    session: str | None = None  # name of the session that the request belongs to
    answered_s: float | None = None  # recorded seconds from arrival to the end of the answer
    has_tools: bool = False  # whether the model may call tools in this session
    is_end: bool = False  # whether the client sent the hint that the session ends
    is_batch: bool = False  # whether the request gives way to others: its class is `batch`
    own_blocks: int = 0  # number of blocks at the prompt's end for which the trace has no ids
    measured: Measured | None = None  # times that a cluster measured; None: no request log

    @property
    def reusable(self) -> tuple[Fingerprint, ...]:
        """Return the blocks that a cache can provide; the last token is always computed."""
        return self.blocks[: reusable_blocks(self.input_tokens, self.block_tokens)]


def read(path: Path, *, limit: int | None, seed: int, model: str | None = None) -> list[Request]:
    """Return the requests of a trace in order of arrival; the first one arrives at 0 s.

    Args:
        path: File with the trace, or a folder with the request logs of several routers, of which
            all .jsonl files are read.
        limit: Maximum number of requests; None: all requests.
        seed: Seed of the random numbers that spread requests with equal timestamps.
        model: Read only the requests for this model; None: the trace has one model.

    Raises:
        TraceError: The trace cannot be replayed.
    """
    recorded = sorted(_requests(path, model), key=lambda request: request.arrival_s)[:limit]
    if len(recorded) < 2:
        of_model = f" of {model}" if model else ""
        raise TraceError(
            f"{path} has {plural(len(recorded), 'request')}{of_model}; a replay needs at least "
            "two. Name a trace in Mooncake's format, or a folder of request logs (.jsonl)"
        )
    first_s = recorded[0].arrival_s
    if first_s == recorded[-1].arrival_s:
        raise TraceError(f"{path}: all timestamps are equal, so there is no rate of arrivals")
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
    """Return the requests with `speed` times their rate of arrivals."""
    return [replace(request, arrival_s=request.arrival_s / speed) for request in requests]


def native_rps(recorded: Sequence[Request]) -> float:
    """Return the recorded number of requests per second."""
    return len(recorded) / span_s(recorded)


def span_s(requests: Sequence[Request]) -> float:
    """Return the seconds from the first arrival to the last."""
    return requests[-1].arrival_s - requests[0].arrival_s


def ideal_hit_tokens(requests: Iterable[Request]) -> list[int]:
    """Return the hit tokens of each request if there was one cache that never evicts a block."""
    seen: set[Fingerprint] = set()
    hits = []
    for request in requests:
        reusable = request.reusable
        hit_blocks = next(
            (i for i, block in enumerate(reusable) if block not in seen), len(reusable)
        )
        hits.append(hit_blocks * request.block_tokens)
        seen.update(request.blocks)
    return hits


def unnamed(requests: Sequence[Request]) -> str:
    """Return a sentence that counts the blocks without ids in the trace; "" if there are none."""
    affected = sum(request.own_blocks > 0 for request in requests)
    if not affected:
        return ""
    tokens = sum(request.own_blocks * request.block_tokens for request in requests)
    share = tokens / sum(request.input_tokens for request in requests)
    return (
        f"blocks without an id: in {affected:,} of {len(requests):,} requests, {tokens:,} tokens "
        f"({share:.1%} of all tokens); each counts as a block that no other request has"
    )


def _requests(path: Path, model: str | None) -> Iterator[Request]:
    first: Request | None = None
    for location, line in _lines(path):
        request = _request(location, line)
        if request is None or model not in (None, request.model):
            continue
        first = first or request
        if request.model != first.model:
            raise TraceError(
                f"{location} is for {request.model}, earlier lines for {first.model}; set --model"
            )
        if request.block_tokens != first.block_tokens:
            raise TraceError(
                f"{location} has blocks of {request.block_tokens} tokens, earlier lines of "
                f"{first.block_tokens}; split the trace by block size"
            )
        yield request


def _lines(path: Path) -> Iterator[tuple[str, str]]:
    """Yield each line with its location; skip incomplete last lines of request logs."""
    for file in sorted(path.glob("*.jsonl")) if path.is_dir() else [path]:
        with file.open() as lines:
            for number, line in enumerate(lines, 1):
                if path.is_dir() and not line.endswith("\n"):
                    break
                yield f"{file}, line {number}", line


def _request(location: str, line: str) -> Request | None:
    """Parse a line; return None for a request that failed or was refused."""
    try:
        row = json.loads(line)
        input_tokens = int(row["input_length"])
        block_tokens = int(row.get("block_size", BLOCK_TOKENS))
        if not 1 <= input_tokens <= MAX_TOKENS:
            raise ValueError(f"input_length is {input_tokens}; expected 1 to {MAX_TOKENS}")
        reusable = reusable_blocks(input_tokens, block_tokens)
        ids = row["hash_ids"][: input_tokens // block_tokens]
        request = Request(
            index=0,
            arrival_s=row["timestamp"] / 1000.0,
            input_tokens=input_tokens,
            output_tokens=max(1, int(row["output_length"])),
            blocks=(*_named_blocks(ids), *_own_blocks(location, len(ids), reusable)),
            block_tokens=block_tokens,
            model=row.get("model"),
            session=None if row.get("session") is None else str(row["session"]),
            answered_s=_answered_s(row),
            has_tools=bool(row.get("tools") or row.get("tool_call") or row.get("hint") == 1),
            is_end=bool(row.get("session_end")),
            is_batch=row.get("priority") == "batch",
            own_blocks=max(0, reusable - len(ids)),
            measured=measured(row),
        )
    except (ValueError, TypeError, KeyError, AttributeError, ZeroDivisionError) as error:
        problem = f"it has no {error}" if isinstance(error, KeyError) else str(error)
        raise TraceError(f"{location} is not a request of a Mooncake trace: {problem}") from None
    return None if row.get("outcome") in NOT_RUN else request


def _named_blocks(ids: Iterable[Any]) -> Iterator[Fingerprint]:
    """Yield a fingerprint for each id: id + 1, since ids start at 0, which no fingerprint is."""
    for id_ in ids:
        yield Fingerprint(int(id_) + 1)


def _own_blocks(location: str, named: int, reusable: int) -> Iterator[Fingerprint]:
    """Yield a unique fingerprint for each block that has no id."""
    for number in range(named, reusable):
        yield Fingerprint(xxh3_64_intdigest(f"{location}, block {number}".encode()))


def _answered_s(row: dict[str, Any]) -> float | None:
    """Return the seconds from arrival to the end of the answer, or None if not recorded."""
    if row.get("duration_s") is None:
        return None
    answered_s = float(row["duration_s"]) + float(row.get("queued_s") or 0.0)
    if not 0.0 <= answered_s < math.inf:
        raise ValueError(f"duration_s + queued_s is {answered_s}")
    return answered_s


def _spread(times_s: Sequence[float], rng: random.Random) -> list[float]:
    """Spread requests with equal timestamps at random over the time until the next timestamp."""
    ticks = [(time_s, len(list(group))) for time_s, group in groupby(times_s)]
    ends_s = [min(later - time_s, TICK_S) for (time_s, _), (later, _) in pairwise(ticks)]
    spread: list[float] = []
    for (time_s, count), width_s in zip(ticks, [*ends_s, TICK_S], strict=True):
        shares = sorted(rng.random() for _ in range(count)) if count > 1 else [0.0]
        spread += [time_s + width_s * share for share in shares]
    return spread
