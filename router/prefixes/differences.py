"""Finds the place where each of several prompts begins to differ from all others."""

from collections.abc import Sequence
from itertools import combinations

import numpy as np

from kvroute.contract.generation import TokenIds


def differences(prompts: Sequence[TokenIds]) -> list[int]:
    """Return, for each prompt, how many tokens it shares with the other that is most like it.

    Prompts that continue the whole prompt are ignored, since nothing of it would be left.
    """
    found = [0] * len(prompts)
    for one, other in combinations(range(len(prompts)), 2):
        shared = shared_tokens(prompts[one], prompts[other])
        for each in (one, other):
            if shared < len(prompts[each]):
                found[each] = max(found[each], shared)
    return found


def shared_tokens(one: TokenIds, other: TokenIds) -> int:
    """Return the number of tokens with which both begin."""
    length = min(len(one), len(other))
    differ = one[:length] != other[:length]
    return int(differ.argmax()) if np.any(differ) else length
