"""Where two prompts part, and what of the earlier one the later one still has."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute.blocks.fingerprint import Feature
from kvroute.contract.generation import TokenIds
from kvroute.router.sessions.breaks import ALIKE, Difference, difference, with_image_numbers


def tokens(count: int, *, of: int = 0) -> TokenIds:
    """Any that do not repeat themselves; others for each `of`."""
    return np.random.default_rng(of).integers(0, 150_000, count).astype(np.uint32)


HEAD, REST = tokens(1203, of=1), tokens(5000, of=2)


def between(old: list[TokenIds], new: list[TokenIds]) -> Difference | None:
    return difference(np.concatenate(old), np.concatenate(new), seed=5)


@pytest.mark.parametrize(("before", "after"), [(12, 12), (12, 9), (0, 30), (30, 0), (900, 2000)])
def test_what_stood_between_two_same_parts_is_found_whatever_its_length(
    before: int, after: int
) -> None:
    old, new = [HEAD, tokens(before, of=3), REST], [HEAD, tokens(after, of=4), REST, tokens(50)]
    found = between(old, new)
    assert found is not None
    assert (found.token, found.alike) == (len(HEAD), len(REST))
    assert (found.before.tokens, found.after.tokens) == (before, after)


def test_messages_that_were_dropped_are_what_stood_there() -> None:
    found = between([HEAD, tokens(20_000, of=3), REST], [HEAD, REST])
    assert found is not None
    assert (found.before.tokens, found.after.tokens, found.alike) == (20_000, 0, len(REST))


def test_another_image_is_a_difference_though_its_tokens_are_the_same() -> None:
    prompt = np.concatenate([HEAD, np.full(30, 7, np.uint32), REST])
    cat, dog = [
        with_image_numbers(prompt, [Feature(name, len(HEAD) + 2, 20)]) for name in ("cat", "dog")
    ]
    found = difference(cat, dog, seed=5)
    assert found is not None
    assert (found.token, found.after.tokens) == (len(HEAD) + 2, 20)
    assert difference(cat, cat, seed=5) is None
    assert with_image_numbers(prompt, []) is prompt


def test_a_prompt_that_goes_on_has_no_difference() -> None:
    assert between([HEAD], [HEAD, REST]) is None
    assert between([HEAD, REST], [HEAD]) is None
    assert between([HEAD], [HEAD]) is None


def test_the_markup_of_an_answers_beginning_is_no_difference() -> None:
    assert between([HEAD, tokens(5, of=3)], [HEAD, REST]) is None


def test_prompts_that_have_only_their_beginning_in_common_have_no_difference() -> None:
    assert between([HEAD, tokens(5000, of=3)], [HEAD, REST]) is None


def test_two_changes_close_together_are_one() -> None:
    gap = tokens(ALIKE - 1, of=9)
    found = between(
        [HEAD, tokens(3, of=3), gap, tokens(3, of=4), REST],
        [HEAD, tokens(3, of=5), gap, tokens(3, of=6), REST],
    )
    assert found is not None
    assert (found.before.tokens, found.alike) == (6 + len(gap), len(REST))


def test_a_second_change_ends_what_the_first_one_cost() -> None:
    old, new = ([HEAD, tokens(3, of=n), REST, tokens(3, of=n), REST] for n in (3, 4))
    found = between(old, new)
    assert found is not None
    assert found.alike == len(REST)


def test_a_line_that_stands_everywhere_is_not_taken_for_the_same_place() -> None:
    line = tokens(ALIKE + 4, of=7)
    old = [HEAD, tokens(400, of=3), line, REST[:2000]]
    new = [HEAD, line, tokens(400, of=4), line, REST]
    found = between(old, new)
    assert found is not None
    assert found.alike == len(line) + 2000


def test_equal_spans_have_equal_hashes_which_are_other_ones_in_another_router() -> None:
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
def test_what_is_told_is_true_of_any_two_prompts(
    head: list[int], one: list[int], other: list[int], rest: list[int]
) -> None:
    old, new = (np.array([*head, *each, *rest], np.uint32) for each in (one, other))
    found = difference(old, new, seed=5)
    if found is None:
        return
    at, begin_old = found.token, found.token + found.before.tokens
    begin_new = found.token + found.after.tokens
    assert old[:at].tolist() == new[:at].tolist()
    assert old[at] != new[at]
    assert found.alike >= ALIKE
    both = old[begin_old : begin_old + found.alike], new[begin_new : begin_new + found.alike]
    assert both[0].tolist() == both[1].tolist()
    assert len(both[0]) == found.alike
