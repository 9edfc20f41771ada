"""The first change between two prompts is found, and the text in common after it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute.blocks.fingerprint import MediaSpan
from kvroute.contract.generation import TokenIds
from kvroute.features.changes.differences import PROBE_TOKENS, difference
from kvroute.features.changes.router_changes import with_image_numbers
from kvroute.router.sessions.breaks import Difference


def tokens(count: int, *, of: int = 0) -> TokenIds:
    """Return random tokens, different ones for each `of`."""
    return np.random.default_rng(of).integers(0, 150_000, count).astype(np.uint32)


HEAD, REST = tokens(1203, of=1), tokens(5000, of=2)


def between(old: list[TokenIds], new: list[TokenIds]) -> Difference | None:
    return difference(np.concatenate(old), np.concatenate(new), seed=5)


@pytest.mark.parametrize(("before", "after"), [(12, 12), (12, 9), (0, 30), (30, 0), (900, 2000)])
def test_a_change_of_any_length_between_two_equal_parts_is_found(before: int, after: int) -> None:
    old, new = [HEAD, tokens(before, of=3), REST], [HEAD, tokens(after, of=4), REST, tokens(50)]
    change = between(old, new)
    assert change is not None
    assert (change.token, change.common) == (len(HEAD), len(REST))
    assert (change.before.tokens, change.after.tokens) == (before, after)


def test_dropped_messages_are_a_change_to_nothing() -> None:
    change = between([HEAD, tokens(20_000, of=3), REST], [HEAD, REST])
    assert change is not None
    assert (change.before.tokens, change.after.tokens, change.common) == (20_000, 0, len(REST))


def test_another_image_is_a_difference_although_its_tokens_are_the_same() -> None:
    prompt = np.concatenate([HEAD, np.full(30, 7, np.uint32), REST])
    cat, dog = [
        with_image_numbers(prompt, [MediaSpan(name, len(HEAD) + 2, 20)]) for name in ("cat", "dog")
    ]
    change = difference(cat, dog, seed=5)
    assert change is not None
    assert (change.token, change.after.tokens) == (len(HEAD) + 2, 20)
    assert difference(cat, cat, seed=5) is None
    assert with_image_numbers(prompt, []) is prompt


def test_a_prompt_that_continues_another_has_no_difference() -> None:
    assert between([HEAD], [HEAD, REST]) is None
    assert between([HEAD, REST], [HEAD]) is None
    assert between([HEAD], [HEAD]) is None


def test_the_markup_at_the_start_of_an_answer_is_no_difference() -> None:
    assert between([HEAD, tokens(5, of=3)], [HEAD, REST]) is None


def test_prompts_with_only_their_beginning_in_common_have_no_difference() -> None:
    assert between([HEAD, tokens(5000, of=3)], [HEAD, REST]) is None


def test_two_changes_close_together_count_as_one() -> None:
    gap = tokens(PROBE_TOKENS - 1, of=9)
    change = between(
        [HEAD, tokens(3, of=3), gap, tokens(3, of=4), REST],
        [HEAD, tokens(3, of=5), gap, tokens(3, of=6), REST],
    )
    assert change is not None
    assert (change.before.tokens, change.common) == (6 + len(gap), len(REST))


def test_the_common_text_ends_at_a_second_change() -> None:
    old, new = ([HEAD, tokens(3, of=n), REST, tokens(3, of=n), REST] for n in (3, 4))
    change = between(old, new)
    assert change is not None
    assert change.common == len(REST)


def test_a_repeated_line_is_not_mistaken_for_the_same_position() -> None:
    line = tokens(PROBE_TOKENS + 4, of=7)
    old = [HEAD, tokens(400, of=3), line, REST[:2000]]
    new = [HEAD, line, tokens(400, of=4), line, REST]
    change = between(old, new)
    assert change is not None
    assert change.common == len(line) + 2000


def test_equal_spans_have_equal_hashes_but_other_ones_in_another_router() -> None:
    one, again, other = (
        difference(
            np.concatenate([HEAD, tokens(12, of=3), REST]),
            np.concatenate([HEAD, tokens(12, of=n), REST]),
            seed=seed,
        )
        for n, seed in ((4, 5), (6, 5), (4, 7))
    )
    assert one is not None
    assert again is not None
    assert other is not None
    assert one.before == again.before
    assert one.after != again.after
    assert one.before != other.before


SHORT_PROMPTS = st.lists(st.integers(0, 3) | st.integers(0, 2**32 - 1), max_size=200)


@given(SHORT_PROMPTS, SHORT_PROMPTS, SHORT_PROMPTS, SHORT_PROMPTS)
def test_the_reported_change_is_right_for_any_two_prompts(
    head: list[int], first: list[int], second: list[int], rest: list[int]
) -> None:
    old, new = (np.array([*head, *middle, *rest], np.uint32) for middle in (first, second))
    change = difference(old, new, seed=5)
    if change is None:
        return
    token, begin_old = change.token, change.token + change.before.tokens
    begin_new = change.token + change.after.tokens
    assert old[:token].tolist() == new[:token].tolist()
    assert old[token] != new[token]
    assert change.common >= PROBE_TOKENS
    both = old[begin_old : begin_old + change.common], new[begin_new : begin_new + change.common]
    assert both[0].tolist() == both[1].tolist()
    assert len(both[0]) == change.common
