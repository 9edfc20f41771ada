"""Prompts share blocks as far as their scopes and their tokens allow, and no further."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kvroute.blocks.chain import Scope, Space
from kvroute.blocks.fingerprint import Fingerprint, MediaSpan

BLOCK = 4
SPACE = Space("m", "r", BLOCK)
ids = st.lists(st.integers(0, 3), max_size=40)
scopes = st.builds(
    Scope,
    variant=st.sampled_from(["", "sql"]),
    namespace=st.sampled_from(["", "a", "b"]),
    shared_tokens=st.integers(0, 6).map(lambda blocks: BLOCK * blocks),
)


def chain(
    token_ids: list[int],
    scope: Scope,
    before: list[Fingerprint] | None = None,
    media: list[MediaSpan] | None = None,
) -> list[Fingerprint]:
    packed = np.array(token_ids, np.uint32)
    return SPACE.chain(packed, scope, media or [], before=before or [])


def may_share(block: int, one: Scope, other: Scope) -> bool:
    """Whether both scopes have the same owner there, and at every block before it."""
    if one.variant != other.variant:
        return False
    end = (block + 1) * BLOCK
    owners = [
        None if not scope.namespace or end <= scope.shared_tokens else own(scope)
        for scope in (one, other)
    ]
    return owners[0] == owners[1]


def own(scope: Scope) -> tuple[str, int]:
    """A namespace's blocks begin somewhere else behind another shared part."""
    return scope.namespace, scope.shared_tokens


@given(ids, ids, scopes, scopes)
def test_blocks_are_shared_exactly_where_tokens_and_scopes_allow_it(
    one: list[int], other: list[int], ones: Scope, others: Scope
) -> None:
    blocks = [[each[i : i + BLOCK] for i in range(0, len(each), BLOCK)] for each in (one, other)]
    pairs = zip(chain(one, ones), chain(other, others), strict=False)
    for i, (mine, theirs) in enumerate(pairs):
        is_same_text = blocks[0][: i + 1] == blocks[1][: i + 1]
        assert (mine == theirs) == (is_same_text and may_share(i, ones, others))


@given(ids, scopes, st.integers(0, 10))
def test_a_chain_can_be_continued_from_any_of_its_blocks(
    token_ids: list[int], scope: Scope, blocks: int
) -> None:
    cat = MediaSpan("cat", 5, 9)
    whole = chain(token_ids, scope, media=[cat])
    begun, rest = whole[:blocks], token_ids[blocks * BLOCK :]
    moved = [MediaSpan("cat", cat.offset - blocks * BLOCK, cat.length)]
    assert begun + chain(rest, scope, before=begun, media=moved) == whole or len(begun) < blocks


def test_the_shared_part_has_equal_fingerprints_in_all_namespaces_and_the_rest_does_not() -> None:
    token_ids = list(range(4 * BLOCK))
    everybodys = chain(token_ids, Scope())
    a, b = (chain(token_ids, Scope("", namespace, 2 * BLOCK)) for namespace in "ab")
    assert a[:2] == b[:2] == everybodys[:2]
    assert not set(a[2:]) & set(b[2:] + everybodys[2:])
    alone = chain(token_ids, replace(Scope(), namespace="a"))
    assert not set(alone) & set(a + everybodys)
