"""`kvroute attach` that places requests by llm-d 1.0's rule: `--policy random` stands for it.

The rule is that of kvroute/replay/policies/llm_d.py, for requests to real servers. As there, it
knows from kvroute's index what each server has cached. `python -m tests.bench.llm_d_gateway attach
URL... --policy random` runs it.
"""

import random
from collections.abc import Sequence
from typing import Any, cast

from kvroute.cli import main
from kvroute.replay.policies.llm_d import LlmD
from kvroute.router.placement import baselines
from kvroute.router.placement.fleet import Fleet
from kvroute.router.placement.policy import Candidate, Prices

STANDS_FOR = "random"  # value of --policy that means llm-d's rule here


class LlmDRule:
    """A ranking of replicas: of those that hold most of the prompt, the one with the least work.

    Attributes:
        prompt_blocks: The blocks of the prompt that is placed next.
    """

    prompt_blocks = 1.0

    def __call__(
        self, candidates: Sequence[Candidate], *, rng: random.Random, prices: Prices
    ) -> list[Candidate]:
        kept = {each.replica_id for each in self._kept(candidates)}
        return sorted(
            rng.sample(candidates, len(candidates)),
            key=lambda each: (each.replica_id not in kept, self._load_s(each)),
        )

    def _kept(self, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
        """Return the replicas among which the load decides."""
        enough = LlmD.AFFINITY * self.prompt_blocks
        near = [each for each in candidates if each.hit_blocks >= enough]
        far = [each for each in candidates if each.hit_blocks < enough]
        if not near or not far:
            return candidates
        more_s = min(each.backlog_s for each in near) - min(each.backlog_s for each in far)
        return candidates if more_s > LlmD.PENALTY_S else near

    def _load_s(self, candidate: Candidate) -> float:
        """Return the seconds of prefill at a replica, with this prompt's."""
        return candidate.backlog_s + candidate.own_s + candidate.copy_s


def install(rule: LlmDRule) -> None:
    """Use the rule in this process."""
    place_chain = Fleet.place_chain

    def place(self: Fleet, chain: Any, prompt_tokens: int, *args: Any, **options: Any) -> Any:
        rule.prompt_blocks = max(1.0, prompt_tokens / self._block_size)
        return place_chain(self, chain, prompt_tokens, *args, **options)

    Fleet.place_chain = place  # type: ignore[method-assign]
    cast("dict[str, Any]", baselines.RANKINGS)[STANDS_FOR] = lambda: rule


if __name__ == "__main__":
    install(LlmDRule())
    main()
