"""Fits the model of an engine to the times in a request log.

Two straight lines are fitted. Both use medians, so that some requests with another cause of delay
do not change them.

Prefill: a *burst* is a time in which a replica has prompts without a first token all the time. It
takes a fixed time plus a time for each unit of work, the prompts' tokens with their attention. The
fixed time beyond the engine's steps is the overhead.

Decode: the mean time between two tokens of an answer, without the prefill of other prompts in that
time, is the time of a step plus a time for each answer that the replica generates at once. Longer
contexts make these times longer, so the time for each answer includes its mean context.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from statistics import median

import numpy as np
from numpy.typing import NDArray

from kvroute.prefill.speed import PrefillModel
from kvroute.replay.hardware.engine_model import EngineModel
from kvroute.replay.workload.trace import Request

PAIRS = 200_000  # pairs of points from which a line's slope follows; more would take much memory
ROUNDS = 2  # times that decode and prefill are fitted; a third round changes less than 1%

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class LoggedAnswer:
    """One answer in the log. Its times are on the clock of the trace."""

    replica: str
    sent_s: float
    first_s: float | None  # time of the first token; None: there was none
    end_s: float
    work: float  # prompt tokens to compute; later tokens count more, see PrefillModel
    steps: int  # steps that the prompt needs alone
    tokens: int  # tokens of the answer


@dataclass(slots=True)
class Burst:
    """Prompts that followed each other at a replica without a pause."""

    start_s: float
    end_s: float  # time of the latest first token
    answers: list[LoggedAnswer] = field(default_factory=list)


def fitted(requests: Sequence[Request], engine: EngineModel) -> EngineModel | None:
    """Return the engine with the speeds that fit the log; None if no request has a first token.

    Args:
        requests: The requests of a log. Requests without measured times are ignored.
        engine: The engine before: its attention_tokens, chunk_tokens and max_sequences are kept.
            A speed is kept if the log does not show it.
    """
    answers = [*_answers(requests, engine)]
    bursts = _short(_bursts(answers))
    if not bursts:
        return None
    # Steps and prefill are mixed in both times, so each fit needs the result of the other one.
    found = replace(_prefill(bursts, replace(engine, step_s=0.0)), step_s=engine.step_s)
    for _ in range(ROUNDS):
        found = _prefill(bursts, _decode(answers, found))
    return found


def _answers(requests: Iterable[Request], engine: EngineModel) -> Iterator[LoggedAnswer]:
    unit = PrefillModel(1.0, engine.prefill.attention_tokens)
    for request in requests:
        measured = request.measured
        if measured is None:
            continue
        sent_s = request.arrival_s + measured.queued_s
        cached = min(measured.cached_tokens, request.input_tokens - 1)
        yield LoggedAnswer(
            replica=measured.replica,
            sent_s=sent_s,
            first_s=None if measured.ttft_s is None else sent_s + measured.ttft_s,
            end_s=sent_s + measured.duration_s,
            work=unit.seconds(cached, request.input_tokens),
            steps=-(-(request.input_tokens - cached) // engine.chunk_tokens),
            tokens=request.output_tokens,
        )


def _of_replicas(answers: Iterable[LoggedAnswer]) -> Iterator[list[LoggedAnswer]]:
    """Yield the answers of each replica in the order in which they were sent."""
    in_order = sorted(answers, key=lambda answer: (answer.replica, answer.sent_s))
    for _, group in groupby(in_order, key=lambda answer: answer.replica):
        yield [*group]


def _bursts(answers: Iterable[LoggedAnswer]) -> Iterator[Burst]:
    """Yield the bursts of each replica, without those in which a prompt got no first token."""
    for of_replica in _of_replicas(answers):
        burst: Burst | None = None
        for answer in of_replica:
            if burst is not None and answer.sent_s >= burst.end_s:
                yield from _usable(burst)
                burst = None
            burst = burst or Burst(answer.sent_s, answer.sent_s)
            burst.answers.append(answer)
            burst.end_s = max(burst.end_s, answer.first_s or answer.end_s)
        if burst is not None:
            yield from _usable(burst)


def _short(bursts: Iterable[Burst]) -> list[Burst]:
    """Return the half of the bursts with the fewest prompts.

    In long bursts, prompts also wait for space in the cache, and for the steps of many answers.
    """
    counted = [*bursts]
    limit = median([len(burst.answers) for burst in counted]) if counted else 0
    return [burst for burst in counted if len(burst.answers) <= limit]


def _usable(burst: Burst) -> Iterator[Burst]:
    if all(answer.first_s is not None for answer in burst.answers):
        yield burst


def _prefill(bursts: Sequence[Burst], engine: EngineModel) -> EngineModel:
    """Return the engine with the speed of prefill and the overhead that fit the bursts."""
    steps = np.array([sum(each.steps for each in burst.answers) for burst in bursts])
    work = np.array([sum(each.work for each in burst.answers) for burst in bursts])
    taken_s = np.array([burst.end_s - burst.start_s for burst in bursts])
    prefill_s = np.maximum(taken_s - steps * engine.step_s, 0.0)
    overhead_s, token_s = _line(work, prefill_s) or (0.0, float(np.median(prefill_s / work)))
    if not token_s:
        return replace(engine, overhead_s=overhead_s)
    speed = PrefillModel(1.0 / token_s, engine.prefill.attention_tokens)
    return replace(engine, prefill=speed, overhead_s=overhead_s)


def _decode(answers: Iterable[LoggedAnswer], engine: EngineModel) -> EngineModel:
    """Return the engine with the times of a step that fit the answers' later tokens."""
    beside: list[Floats] = []
    step_s: list[Floats] = []
    for of_replica in _of_replicas(answers):
        begun = [answer for answer in of_replica if answer.first_s is not None]
        long = [answer for answer in begun if answer.tokens > 1]
        if not long:
            continue
        first_s = np.array([answer.first_s for answer in begun], dtype=float)
        end_s = np.array([answer.end_s for answer in begun])
        own_first_s = np.array([answer.first_s for answer in long], dtype=float)
        own_end_s = np.array([answer.end_s for answer in long])
        own_tokens = np.array([answer.tokens - 1 for answer in long])
        length_s = np.maximum(own_end_s - own_first_s, 1e-9)
        running = _sum_until(own_end_s, first_s, end_s) - _sum_until(own_first_s, first_s, end_s)
        beside.append(running / length_s)
        order = np.argsort(first_s)
        work = np.concatenate([[0.0], np.cumsum([begun[i].work for i in order])])
        until_end, until_first = (
            work[np.searchsorted(first_s[order], at_s, side="right")]
            for at_s in (own_end_s, own_first_s)
        )
        stalled_s = (until_end - until_first) / engine.prefill.tokens_per_s
        step_s.append(np.maximum(length_s - stalled_s, 0.0) / own_tokens)
    if not beside:
        return engine
    times_s = np.concatenate(step_s)
    fixed_s, sequence_s = _line(np.concatenate(beside), times_s) or (float(np.median(times_s)), 0.0)
    return replace(engine, step_s=fixed_s, sequence_s=sequence_s, context_token_s=0.0)


def _sum_until(at_s: Floats, begin_s: Floats, end_s: Floats) -> Floats:
    """Return how long all intervals together lasted until each of the times `at_s`."""
    begins, ends = np.sort(begin_s), np.sort(end_s)

    def ended(edges: Floats) -> Floats:
        """Return the seconds since each edge that is in the past, in all."""
        sums = np.concatenate([[0.0], np.cumsum(edges)])
        count = np.searchsorted(edges, at_s, side="right")
        lasted: Floats = count * at_s - sums[count]
        return lasted

    return ended(begins) - ended(ends)


def _line(x: Floats, y: Floats) -> tuple[float, float] | None:
    """Fit y = fixed + slope * x, with fixed >= 0 and slope > 0 (the estimator of Theil and Sen).

    The slope is the median over pairs of points. A pair counts as much as its points are apart,
    since the slope between near points is mostly noise.

    Returns:
        The fixed part and the slope; None if no slope can be seen.
    """
    first, second = np.random.default_rng(0).integers(0, len(x), (2, PAIRS))
    apart = x[first] - x[second]
    first, second, apart = first[apart > 0], second[apart > 0], apart[apart > 0]
    if not len(apart):
        return None
    slope = _weighted_median((y[first] - y[second]) / apart, apart)
    if slope <= 0:
        return None
    fixed = float(np.median(y - slope * x))
    return (fixed, slope) if fixed >= 0 else (0.0, float(np.median(y / x)))


def _weighted_median(values: Floats, weights: Floats) -> float:
    order = np.argsort(values)
    sums = np.cumsum(weights[order])
    return float(values[order][np.searchsorted(sums, sums[-1] / 2)])
