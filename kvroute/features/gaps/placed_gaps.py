"""Where prompts are placed if the time between tokens counts: long ones where few answers run.

A prompt delays all answers that run on its replica. So long prompts go to replicas with few
answers. Short ones avoid these replicas, which have more to compute, and so do their answers.
"""

from collections.abc import Sequence

from kvroute.features.placing_feature import PlacingFeature
from kvroute.router.placement.policy import Candidate, PromptFacts, Term

# The cost of a prompt on a replica that runs as many requests as others, as a share of the time to
# compute it. It was chosen in replays of conversations and agents.
WEIGHT = 0.5


class PlacedGaps(PlacingFeature):
    """The term "gaps" of the cost of replicas."""

    name = "gaps"

    def weigh(
        self, prompt: PromptFacts, candidates: Sequence[Candidate], now_s: float
    ) -> Sequence[Candidate]:
        """Return the candidates with the delay of their answers by the prompt."""
        running = sum([candidate.unanswered for candidate in candidates])
        if not running:
            return candidates
        weight = WEIGHT * len(candidates) / running
        return [
            candidate._replace(
                terms=(*candidate.terms, Term("gaps", weight * delay_s(candidate), "others"))
            )
            for candidate in candidates
        ]


def delay_s(candidate: Candidate) -> float:
    """Return the delay of all requests there by this prompt, in seconds times requests."""
    return (candidate.own_s + candidate.copy_s) * candidate.unanswered
