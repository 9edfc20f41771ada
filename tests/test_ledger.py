"""Every token of a prompt has one place in the ledger."""

from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from router.ledger import account

TOKENS = st.integers(0, 10_000)


def ledger(**lengths: Any) -> dict[str, int]:
    """What is not 0 of a ledger for 100 tokens, of which 96 are cacheable."""
    whole = {"cacheable": 96, "reusable": 0, "expected": 0, "delivered": 0, **lengths}
    found = msgspec.structs.asdict(account(100, **whole))
    return {cause: tokens for cause, tokens in found.items() if tokens}


@given(TOKENS, TOKENS, TOKENS, TOKENS, TOKENS, st.booleans())
def test_the_causes_add_up_to_the_prompt_whatever_is_claimed(
    prompt: int, cacheable: int, reusable: int, expected: int, delivered: int, is_salted: bool
) -> None:
    found = account(
        prompt,
        cacheable=cacheable,
        reusable=reusable,
        expected=expected,
        delivered=delivered,
        is_salted=is_salted,
    )
    tokens = msgspec.structs.astuple(found)
    assert sum(tokens) == prompt
    assert min(tokens) >= 0
    assert found.hit + found.surprise == min(delivered, prompt)
    assert found.hit + found.stale == min(expected, prompt)


def test_a_prompt_that_nobody_had_is_new_but_for_its_last_block() -> None:
    assert ledger() == {"new": 96, "tail": 4}


def test_what_was_expected_and_came_is_a_hit() -> None:
    assert ledger(reusable=64, expected=64, delivered=64) == {"hit": 64, "new": 32, "tail": 4}


def test_what_was_expected_and_did_not_come_is_stale() -> None:
    found = ledger(reusable=64, expected=64, delivered=32)
    assert found == {"hit": 32, "stale": 32, "new": 32, "tail": 4}


def test_what_another_replica_had_is_spilled() -> None:
    found = ledger(reusable=96, expected=32, delivered=32)
    assert found == {"hit": 32, "spilled": 64, "tail": 4}


def test_a_surprise_is_taken_from_what_would_have_been_lost() -> None:
    found = ledger(reusable=64, expected=32, delivered=80)
    assert found == {"hit": 32, "surprise": 48, "new": 16, "tail": 4}


def test_what_is_new_under_a_salt_may_be_somebody_elses() -> None:
    found = ledger(reusable=32, expected=32, delivered=32, is_salted=True)
    assert found == {"hit": 32, "apart": 64, "tail": 4}
