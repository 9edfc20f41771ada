"""Equal prefixes have equal fingerprints, and nothing else does."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute.contract.fingerprint import Fingerprint, fingerprints, reusable_blocks, root

ROOT = root(model="m", block_size=4)
token_ids = st.lists(st.integers(0, 2**32 - 1), max_size=40)


def chain(ids: list[int], parent: Fingerprint = ROOT, block_size: int = 4) -> list[Fingerprint]:
    return fingerprints(np.array(ids, np.uint32), block_size=block_size, parent=parent)


def test_the_fingerprints_are_pinned() -> None:
    """Other versions of kvroute read what this one wrote: a change here is a new version prefix."""
    parent = root(model="m", revision="r", block_size=4, lora="l", namespace="n")
    assert parent == 0x0EE9A9130D6258D0
    assert chain([1, 2, 3, 4, 5, 6, 7, 2**32 - 1], parent) == [
        0xC6FC7FE22A0E5563,
        0x2850E360B1BB3C2D,
    ]


@given(token_ids, token_ids)
def test_prompts_share_fingerprints_exactly_as_far_as_they_share_blocks(
    one: list[int], other: list[int]
) -> None:
    blocks = [[ids[i : i + 4] for i in range(0, len(ids) - 3, 4)] for ids in (one, other)]
    for i, (mine, theirs) in enumerate(zip(chain(one), chain(other), strict=False)):
        assert (mine == theirs) == (blocks[0][: i + 1] == blocks[1][: i + 1])


@given(token_ids, st.integers(0, 9))
def test_a_chain_continues_from_any_of_its_blocks(ids: list[int], cut: int) -> None:
    whole = chain(ids)
    cut = min(cut, len(whole))
    parent = whole[cut - 1] if cut else ROOT
    assert whole[:cut] + chain(ids[4 * cut :], parent) == whole


@pytest.mark.parametrize(
    "other",
    [
        {"model": "n"},
        {"model": "m", "revision": "2"},
        {"model": "m", "lora": "a"},
        {"model": "m", "namespace": "tenant"},
    ],
)
def test_caches_that_cannot_be_shared_have_different_roots(other: dict[str, str]) -> None:
    assert root(block_size=4, **other) != ROOT
    assert root(block_size=8, model="m") != ROOT


@pytest.mark.parametrize(
    ("prompt_tokens", "blocks"), [(0, 0), (1, 0), (32, 0), (33, 1), (64, 1), (65, 2)]
)
def test_a_prompts_last_token_is_always_computed(prompt_tokens: int, blocks: int) -> None:
    assert reusable_blocks(prompt_tokens, 32) == blocks
