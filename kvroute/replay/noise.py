"""Tells real differences between policies from noise, with a bootstrap over the trace.

A replay is one sample of the traffic: with other requests, the figures would differ. The requests
are divided into BLOCKS consecutive parts, since consecutive requests share a queue. In each of
ROUNDS rounds, BLOCKS parts are drawn with repetition, the same parts for all policies, and each
figure is computed from them. So each round gives one difference between two policies. If 0 is
within the middle 95% of these differences, the policies differ only by noise.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvroute.replay.simulate import Outcome
from kvroute.replay.workload.trace import Request

BLOCKS = 20  # number of parts of the trace
ROUNDS = 200  # number of bootstrap rounds
MIDDLE = (2.5, 97.5)  # percentiles that limit the middle 95% of the rounds
QUANTILES = {"ttft_p50_s": 50, "ttft_p90_s": 90, "ttft_p99_s": 99}  # field of Summary -> percentile

Floats = NDArray[np.float64]
Figures = Mapping[str, Floats]  # field of Summary -> its value in each round


@dataclass(frozen=True, slots=True)
class PolicySample:
    """The measured requests of one policy, in the order of arrival."""

    ttft_s: Floats
    hit_tokens: Floats
    input_tokens: Floats

    def figures(self, rounds: NDArray[np.int64]) -> Figures:
        """Return the figures of each round.

        Args:
            rounds: One row for each round: the positions of the requests that were drawn.
        """
        hits = self.hit_tokens[rounds].sum(axis=1) / self.input_tokens[rounds].sum(axis=1)
        times_s = np.percentile(self.ttft_s[rounds], [*QUANTILES.values()], axis=1)
        return {"hit_share": hits, **dict(zip(QUANTILES, times_s, strict=True))}


def sample(requests: Sequence[Request], outcome: Outcome, measured: slice) -> PolicySample:
    """Return the measured requests of one policy."""
    ttft_s = np.array(outcome.first_token_s) - np.array(outcome.arrival_s)
    return PolicySample(
        ttft_s[measured],
        np.array(outcome.hit_tokens[measured], dtype=float),
        np.array([request.input_tokens for request in requests[measured]], dtype=float),
    )


def ties(samples: Mapping[str, PolicySample]) -> dict[str, dict[str, float]]:
    """Return, for each field of Summary, the policies that differ from the best only by noise.

    The result is empty if the samples have too few requests for this method, see is_enough.

    Args:
        samples: Policy -> its measured requests; all policies have the same requests.

    Returns:
        Field -> policy -> how many times as many requests would show the difference, if it stays
        the same: noise becomes smaller by the square root of the number of requests.
    """
    count = len(next(iter(samples.values())).ttft_s)
    if not is_enough(count):
        return {}
    rounds = _rounds(count)
    figures_of_all = {
        name: policy_sample.figures(np.arange(count)[None])
        for name, policy_sample in samples.items()
    }
    drawn = {name: policy_sample.figures(rounds) for name, policy_sample in samples.items()}
    noise = {}
    for field in ("hit_share", *QUANTILES):
        sign = -1 if field == "hit_share" else 1  # a high hit share and a short time are good
        values = {name: float(figures[field][0]) for name, figures in figures_of_all.items()}
        best = min(samples, key=lambda name: sign * values[name])
        noise[field] = {
            name: _times_more(drawn[name][field] - drawn[best][field], values[name] - values[best])
            for name in samples
            if name != best and _is_noise(drawn[name][field] - drawn[best][field])
        }
    return noise


def is_enough(count: int) -> bool:
    """Return whether so many measured requests can be divided into BLOCKS parts."""
    return count >= BLOCKS


def _rounds(count: int) -> NDArray[np.int64]:
    """Return a row of request positions for each round; all rows have the same length."""
    length = max(1, count // BLOCKS)
    starts = length * np.arange(count // length)
    picks = np.random.default_rng(0).choice(starts, (ROUNDS, len(starts)))
    rounds: NDArray[np.int64] = (picks[:, :, None] + np.arange(length)).reshape(ROUNDS, -1)
    return rounds


def _is_noise(differences: Floats) -> bool:
    low, high = np.percentile(differences, MIDDLE)
    return bool(low <= 0 <= high)


def _times_more(differences: Floats, difference: float) -> float:
    """Return how many times as many requests would show this difference; inf: it is 0.

    The middle 95% must become so narrow that 0 is no longer in it.
    """
    if not difference:
        return math.inf
    low, high = np.percentile(differences, MIDDLE)
    to_edge = difference - low if difference > 0 else difference - high
    return max(1.0, float(to_edge / difference) ** 2)
