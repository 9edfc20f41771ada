"""The traces of the policy benchmark: recorded ones if files are given, else generated ones."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import count
from pathlib import Path

from kvroute.replay.workload.trace import Request, TraceError, read
from tests.support.traces import agents, chats, documents, fan_outs, mix

# Maximum shift of a session's start for seeds after the first one, in seconds.
JITTER_S = 60.0

Files = Mapping[str, Path]  # name of a trace -> file with a recorded trace
FILES = ("conversation", "agents", "agents-busy")  # traces that a recorded one may replace


def workload(name: str, files: Files, *, limit: int | None, seed: int) -> Sequence[Request]:
    """Return the first requests of a trace, with their original times."""
    return _workload(name, tuple(sorted(files.items())), seed)[:limit]


@lru_cache(maxsize=4)  # consecutive cells of a process mostly have the same trace
def _workload(name: str, files: Sequence[tuple[str, Path]], seed: int) -> Sequence[Request]:
    recorded = dict(files)
    if name in recorded:
        return moved(read(recorded[name], limit=None, seed=seed), seed)
    match name:
        case "conversation":
            return chats(seed)
        case "agents":
            return agents(seed)
        case "agents-busy":
            return agents(seed, sessions=1800)
        case "documents":
            return documents(seed, visits=1500)
        case "fan-outs":
            return fan_outs(seed)
        case "forks":
            return fan_outs(seed, families=40, width=(16, 16), least=100_000)
        case "mixed":
            return mix(seed, recorded.get("conversation"))
    raise TraceError(f"there is no trace {name!r}; --list prints the cells, which name the traces")


def moved(requests: Sequence[Request], seed: int) -> Sequence[Request]:
    """Return the same sessions with other start times.

    So runs with different seeds differ in the trace too, not only in the policy's random numbers.
    With seed 0, start times stay as they are.
    """
    if not seed:
        return requests
    rng = random.Random(seed)
    names = {request.session: rng.uniform(0, JITTER_S) for request in requests if request.session}
    later = [
        replace(request, arrival_s=request.arrival_s + names.get(request.session or "", 0.0))
        for request in requests
    ]
    later.sort(key=lambda request: request.arrival_s)
    first_s = later[0].arrival_s
    return [
        replace(request, index=index, arrival_s=request.arrival_s - first_s)
        for index, request in zip(count(), later, strict=False)
    ]
