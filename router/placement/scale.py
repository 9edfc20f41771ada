"""The fleet's units of time: the mean prefill time and the mean answer time of its requests.

The policy and the queue have no constants in seconds, since those would fit only one engine and one
kind of traffic. They use these units instead. So an engine that is k times slower gets the same
decisions if its requests arrive k times more slowly.

Prompt lengths are heavy-tailed: a mean over some hundreds of them varies by a third. So the means
are over thousands of requests of all routers. At the start, the mean prefill time is computed from
the speed that the engine reports.
"""

from dataclasses import dataclass

from kvroute.contract.messages import LearnedScale

MEMORY = 3000  # number of recent requests in the means
PRIOR = 100  # the start value counts as much as this many requests
# Mean square of prefill times at the start, divided by the square of their mean.
PRIOR_SPREAD = 4.0


@dataclass(slots=True)
class Scale:
    """Means over the latest requests of all routers.

    Args:
        prefill_s: the mean prefill time, in seconds, to assume before any request has come.
    """

    prefill_s: float
    answer_s: float = 0.0  # mean seconds from a first token to the end of the answer
    _square: float = 0.0  # mean of the squares of prefill times
    _prefills: int = PRIOR  # number of requests in the means of prefill times
    _answers: int = 0  # number of requests in the mean of answer times

    def __post_init__(self) -> None:
        self._square = PRIOR_SPREAD * self.prefill_s**2

    @property
    def busy_s(self) -> float:
        """Return the mean remaining time of the prompt that a busy replica computes, in seconds.

        This is what a new request finds when it arrives. It is the mean square of prefill times
        divided by twice their mean. As in the Pollaczek-Khinchine formula, waits are proportional
        to it.
        """
        return self._square / (2.0 * self.prefill_s)

    def share(self) -> LearnedScale:
        """Return the means to publish for routers that have just started."""
        return LearnedScale(self.prefill_s, self._square, self._prefills)

    def adopt(self, learned: LearnedScale) -> None:
        """Use another router's means if they are based on more requests than these."""
        if self._prefills < learned.requests <= MEMORY and learned.prefill_s > 0.0:
            self.prefill_s, self._square = learned.prefill_s, learned.square_s2
            self._prefills = learned.requests

    def record_prefill(self, prefill_s: float) -> None:
        """Add a request's predicted prefill time to the means."""
        self._prefills = min(MEMORY, self._prefills + 1)
        weight = 1.0 / self._prefills
        self.prefill_s += weight * (prefill_s - self.prefill_s)
        self._square += weight * (prefill_s**2 - self._square)

    def record_answer(self, answer_s: float) -> None:
        """Add an answer's time after its first token to the mean."""
        self._answers = min(MEMORY, self._answers + 1)
        self.answer_s += (answer_s - self.answer_s) / self._answers
