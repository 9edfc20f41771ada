"""Finds the place where each of several prompts begins to differ from all others."""

from collections.abc import Sequence
from itertools import combinations

import numpy as np

from kvroute.contract.generation import TokenIds


def differences(prompts: Sequence[TokenIds]) -> list[int]:
    """Return, for each prompt, how many leading tokens it shares with the most similar other one.

    A prompt is not compared with prompts that continue it, since it does not differ from them.
    """
    most_shared = [0] * len(prompts)
    for left, right in combinations(range(len(prompts)), 2):
        shared = shared_tokens(prompts[left], prompts[right])
        for index in (left, right):
            if shared < len(prompts[index]):
                most_shared[index] = max(most_shared[index], shared)
    return most_shared


def shared_tokens(left: TokenIds, right: TokenIds) -> int:
    """Return the length of the longest common prefix of two prompts, in tokens."""
    length = min(len(left), len(right))
    differ = left[:length] != right[:length]
    return int(differ.argmax()) if np.any(differ) else length
