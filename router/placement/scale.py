"""The fleet's own units of time: how long its requests compute and answer.

The policy and the queue have no constants in seconds, which would fit one engine and one kind of
traffic. They count in these units. An engine that is k times slower, under requests that come k
times slower, then gets the same decisions.

Prompt lengths are heavy-tailed: a mean over some hundreds of them moves by a third. So the means
are over thousands of requests, of all routers. They begin with what the engine claims.
"""

from dataclasses import dataclass

from kvroute.contract.messages import LearnedScale

MEMORY = 3000  # requests whose mean is taken
PRIOR = 100  # requests that a claim weighs as much as
PRIOR_SPREAD = 4.0  # mean square over squared mean of prefill times, before any was seen


@dataclass(slots=True)
class Scale:
    """Means over the latest requests of all routers.

    Args:
        prefill_s: the mean prefill time that is expected before any request was seen.
    """

    prefill_s: float
    answer_s: float = 0.0  # mean time from a first token to the end of the answer
    _square: float = 0.0  # mean of the squares of prefill times
    _prefills: int = PRIOR
    _answers: int = 0

    def __post_init__(self) -> None:
        self._square = PRIOR_SPREAD * self.prefill_s**2

    @property
    def busy_s(self) -> float:
        """Return the mean time that a new request finds left of a prompt that is computed.

        Waits grow with it, as in the Pollaczek-Khinchine formula: it is the mean square of prefill
        times over twice their mean.
        """
        return self._square / (2.0 * self.prefill_s)

    def share(self) -> LearnedScale:
        """Return what other routers may adopt."""
        return LearnedScale(self.prefill_s, self._square, self._prefills)

    def adopt(self, learned: LearnedScale) -> None:
        """Take over another router's means if they are of more requests than these."""
        if self._prefills < learned.requests <= MEMORY and learned.prefill_s > 0.0:
            self.prefill_s, self._square = learned.prefill_s, learned.square_s2
            self._prefills = learned.requests

    def computed(self, prefill_s: float) -> None:
        """Record the prefill time of a request, as it is predicted."""
        self._prefills = min(MEMORY, self._prefills + 1)
        weight = 1.0 / self._prefills
        self.prefill_s += weight * (prefill_s - self.prefill_s)
        self._square += weight * (prefill_s**2 - self._square)

    def answered(self, answer_s: float) -> None:
        """Record the time of an answer after its first token."""
        self._answers = min(MEMORY, self._answers + 1)
        self.answer_s += (answer_s - self.answer_s) / self._answers
