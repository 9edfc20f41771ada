"""What a cluster's request log says about the cluster: its replicas, their caches and speed.

A replay of a request log takes these values where no option sets another one.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median_low
from typing import NamedTuple, TypeVar

from kvroute.prefill.speed import PrefillModel
from kvroute.replay.fitted_engine import fitted
from kvroute.replay.hardware.engine_model import EngineModel
from kvroute.replay.simulate import Outcome
from kvroute.replay.steps import blocks_needed
from kvroute.replay.summary import MEASURED, Summary, summarise
from kvroute.replay.workload.measured import Measured
from kvroute.replay.workload.trace import Request
from kvroute.wording import plural

N = TypeVar("N", int, float)


class Missing(NamedTuple):
    """A value that a log does not have."""

    option: str  # name of the option that sets the value
    sentence: str


@dataclass(frozen=True, slots=True)
class LoggedFleet:
    """The fleet that has written a request log."""

    replicas: int
    kv_tokens: int | None  # KV cache of each replica, in tokens; None: unknown
    engine: EngineModel | None  # the engine that fits the measured times; None: there are none
    host_tokens: int  # hit tokens that were reloaded from host memory
    replica_counts: tuple[int, int]  # fewest and most replicas, (0, 0): unknown

    def missing(self) -> Iterator[Missing]:
        """Yield the values that the log does not have, or of which it has several."""
        fewest, most = self.replica_counts
        if not most:
            answered = f"{plural(self.replicas, 'replica')} answered"
            yield Missing("replicas", f"{answered}; the log does not say whether there were others")
        elif fewest < most:
            yield Missing("replicas", f"the cluster had {fewest} to {most} replicas")
        if self.kv_tokens is None:
            yield Missing("kv_tokens", "the log does not have the size of the KV cache")
        if self.engine is None:
            yield Missing("engine", "no request has a first token, so the speed is unknown")
        if self.host_tokens:
            yield Missing(
                "host_tokens",
                f"{self.host_tokens:,} tokens came from host memory, and the log does not have its "
                "size",
            )


def logged_fleet(requests: Sequence[Request], engine: EngineModel) -> LoggedFleet | None:
    """Return the fleet that has written the log; None if this is another trace.

    Args:
        requests: The requests of the trace.
        engine: The engine whose values are used where the log has none.
    """
    logged = [request.measured for request in requests if request.measured is not None]
    if len(logged) < len(requests):
        return None
    counts = [each.replicas for each in logged if each.replicas]
    kv_tokens = _median(each.kv_tokens for each in logged)
    if kv_tokens is not None:  # the log's blocks are larger than the engine's
        largest = max(blocks_needed(request) * request.block_tokens for request in requests)
        kv_tokens = max(kv_tokens, largest)
    return LoggedFleet(
        replicas=median_low(counts) if counts else len({each.replica for each in logged}),
        kv_tokens=kv_tokens,
        engine=fitted(requests, _as_logged(logged, engine)),
        host_tokens=sum(each.host_tokens for each in logged),
        replica_counts=(min(counts), max(counts)) if counts else (0, 0),
    )


def measured_summary(requests: Sequence[Request], engine: EngineModel) -> Summary | None:
    """Return the figures that the cluster has measured; None if there are too few first tokens.

    Args:
        requests: The requests of a log.
        engine: The engine from whose speed the replicas' seconds of prefill are estimated.
    """
    logged = [
        (request, request.measured, request.measured.ttft_s)
        for request in requests
        if request.measured is not None and request.measured.ttft_s is not None
    ]
    begun = [request for request, *_ in logged]
    if not begun or begun[0].arrival_s == begun[-1].arrival_s:
        return None
    prefill_s: dict[str, float] = {}
    for request, measured, _ in logged:
        computed_s = engine.prefill.seconds(measured.cached_tokens, request.input_tokens)
        prefill_s[measured.replica] = prefill_s.get(measured.replica, 0.0) + computed_s
    sent_s = [request.arrival_s + measured.queued_s for request, measured, _ in logged]
    none = [0] * len(logged)
    outcome = Outcome(
        arrival_s=[request.arrival_s for request in begun],
        first_token_s=[at_s + ttft_s for at_s, (*_, ttft_s) in zip(sent_s, logged, strict=True)],
        finished_s=[
            at_s + measured.duration_s
            for at_s, (_, measured, _) in zip(sent_s, logged, strict=True)
        ],
        hit_tokens=[measured.cached_tokens for _, measured, _ in logged],
        prefill_s=[*prefill_s.values()],
        reloaded_tokens=[measured.host_tokens for _, measured, _ in logged],
        disk_tokens=none,
        reload_wait_s=[0.0] * len(logged),
        reload_s=[0.0] * len(prefill_s),
        pulled_tokens=none,
    )
    return summarise(MEASURED, begun, outcome)


def speed_of(engine: EngineModel) -> str:
    """Return the speed of a fitted engine in words."""
    step_ms = 1000 * (engine.step_s + engine.sequence_s)
    overhead_ms = 1000 * engine.overhead_s
    return (
        f"{engine.prefill.tokens_per_s:,.0f} prompt tokens/s, steps of {step_ms:.1f} ms, "
        f"{overhead_ms:.1f} ms of overhead"
    )


def _as_logged(logged: Sequence[Measured], engine: EngineModel) -> EngineModel:
    """Return the engine with the properties that the log has."""
    attention = _median(each.attention_tokens for each in logged)
    step_tokens = _median(each.step_tokens for each in logged)
    return replace(
        engine,
        prefill=PrefillModel(
            engine.prefill.tokens_per_s, attention or engine.prefill.attention_tokens
        ),
        chunk_tokens=step_tokens or engine.chunk_tokens,
    )


def _median(values: Iterable[N | None]) -> N | None:
    """Return the median of the values that are known; None if there are none."""
    known = [value for value in values if value is not None]
    return median_low(known) if known else None
