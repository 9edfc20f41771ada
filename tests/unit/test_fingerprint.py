"""Equal prefixes have equal fingerprints, and nothing else does."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute.blocks.fingerprint import (
    Fingerprint,
    MediaSpan,
    fingerprints,
    reusable_blocks,
    root,
)

ROOT = root(model="m", block_size=4)
token_ids = st.lists(st.integers(0, 2**32 - 1), max_size=40)


def chain(
    ids: list[int], parent: Fingerprint = ROOT, media: Sequence[MediaSpan] = ()
) -> list[Fingerprint]:
    return fingerprints(np.array(ids, np.uint32), block_size=4, parent=parent, media=media)


@st.composite
def media_lists(draw: st.DrawFn) -> list[MediaSpan]:
    """Sorted by offset; some overlap."""
    places = draw(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 30)), max_size=6))
    names = st.sampled_from(["cat", "dog", "cow"])
    return [MediaSpan(draw(names), *place) for place in sorted(places)]


def test_the_fingerprints_are_pinned() -> None:
    """Other versions of kvroute read what this one wrote: a change here is a new version prefix."""
    parent = root(model="m", revision="r", block_size=4, variant="l", namespace="n")
    assert parent == 0x0E56778B9C385797
    ids = [1, 2, 3, 4, 5, 6, 7, 2**32 - 1]
    assert chain(ids, parent) == [0x26EA7540DFE902F2, 0xD84409150D7C7FC2]
    media = [MediaSpan("cat", 1, 2), MediaSpan("dog", 3, 9)]
    assert chain(ids, parent, media=media) == [0xFDCD2EB03DC0038F, 0xD8312C9D854205A]


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


@given(media_lists(), st.integers(0, 20))
def test_so_it_does_amid_images(media: list[MediaSpan], cut: int) -> None:
    ids = [7] * 80
    whole = chain(ids, media=media)
    parent = whole[cut - 1] if cut else ROOT
    rest = [MediaSpan(span.identifier, span.offset - 4 * cut, span.length) for span in media]
    assert whole[:cut] + chain(ids[4 * cut :], parent, rest) == whole


def test_prompts_share_fingerprints_as_far_as_their_images_are_the_same() -> None:
    ids, cat, dog = [7] * 40, MediaSpan("cat", 6, 5), MediaSpan("dog", 20, 9)
    one = chain(ids, media=[cat, dog])
    for others, same in (
        ([], 1),
        ([MediaSpan("cow", 6, 5), dog], 1),
        ([MediaSpan("cat", 5, 5), dog], 1),
        ([cat], 5),
        ([cat, MediaSpan("dog", 21, 9)], 5),
        ([cat, dog, MediaSpan("cow", 32, 1)], 8),
    ):
        other = chain(ids, media=others)
        assert [a == b for a, b in zip(one, other, strict=True)] == [i < same for i in range(10)]


@pytest.mark.parametrize(
    "other",
    [
        {"model": "n"},
        {"model": "m", "revision": "2"},
        {"model": "m", "variant": "a"},
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
