"""Fits an engine model to measured times. Uses arithmetic only, no clocks or sockets."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, combinations

import numpy as np
from numpy.typing import NDArray

from kvroute.prefill.speed import PrefillModel
from kvroute.replay.calibration.model import EngineModel

NO_ATTENTION_TOKENS = 1e9  # attention_tokens if prefill times have no measurable quadratic term
REMEDY = "measure again while nothing else uses the cluster or its machines"

Floats = NDArray[np.float64]


class FitError(ValueError):
    """The samples fit no engine. The message says why."""


@dataclass(frozen=True, slots=True)
class Prefill:
    """A prompt that was alone on its replica."""

    tokens: int
    ttft_s: float


@dataclass(frozen=True, slots=True)
class Decode:
    """Sequences that decoded together on one replica."""

    sequences: int
    context_tokens: float  # context of all sequences together, averaged over the steps
    step_s: float


@dataclass(frozen=True, slots=True)
class Fit:
    engine: EngineModel
    overhead_s: float  # part of a time to first token that is spent outside of the engine
    prefill_error: float  # root mean square of the relative residuals
    decode_error: float


def fit(prefills: Sequence[Prefill], decodes: Sequence[Decode]) -> Fit:
    """Fit steps to the decodes, then prefill to the times to first token minus their steps."""
    (step_s, sequence_s, context_token_s), decode_error = non_negative_fit(
        [[1.0, decode.sequences, decode.context_tokens] for decode in decodes],
        [decode.step_s for decode in decodes],
    )
    if not step_s:
        raise FitError(f"a decode step of few sequences seems to take no time; {REMEDY}")
    chunk_tokens = EngineModel().chunk_tokens
    (overhead_s, token_s, square_s), prefill_error = non_negative_fit(
        [[1.0, prompt.tokens, prompt.tokens**2 / 2] for prompt in prefills],
        [
            max(0.0, prompt.ttft_s - (step_s + sequence_s) * -(-prompt.tokens // chunk_tokens))
            for prompt in prefills
        ],
        [prompt.ttft_s for prompt in prefills],
    )
    if not token_s:
        raise FitError(f"the time to a first token hardly grows with the prompt; {REMEDY}")
    attention_tokens = token_s / max(square_s, token_s / NO_ATTENTION_TOKENS)
    prefill = PrefillModel(1 / token_s, attention_tokens)
    engine = EngineModel(prefill, step_s, sequence_s, context_token_s, chunk_tokens)
    return Fit(engine, overhead_s, prefill_error, decode_error)


def non_negative_fit(
    rows: Sequence[Sequence[float]],
    values: Sequence[float],
    scales: Sequence[float] | None = None,
) -> tuple[list[float], float]:
    """Return the non-negative coefficients of a least-squares fit, and the error.

    Residuals are divided by the scales (default: the values); the error is their root mean square.
    The best solution is an ordinary fit to a subset of the columns, so all subsets are tried.
    """
    scale = np.array(scales or values)
    matrix, target = np.array(rows) / scale[:, None], np.array(values) / scale
    best, least = np.zeros(matrix.shape[1]), _rms(target)
    columns = range(matrix.shape[1])
    for chosen in chain.from_iterable(combinations(columns, k + 1) for k in columns):
        solution = _least_squares(matrix[:, chosen], target)
        error = _rms(matrix[:, chosen] @ solution - target)
        if (solution >= 0).all() and error < least:
            best[:] = 0.0
            best[list(chosen)] = solution
            least = error
    return best.tolist(), least


def _least_squares(matrix: Floats, target: Floats) -> Floats:
    largest = np.abs(matrix).max(
        axis=0
    )  # normalises columns, which range from 1 to squares of lengths
    solution: Floats = np.linalg.lstsq(matrix / largest, target, rcond=None)[0] / largest
    return solution


def _rms(deviations: Floats) -> float:
    return float(np.sqrt(np.mean(deviations**2)))
