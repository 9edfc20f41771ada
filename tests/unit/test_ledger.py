"""The ledger counts every token of a prompt under one cause."""

from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from kvroute.router.placement.ledger import account

TOKENS = st.integers(0, 10_000)
LENGTHS = "cacheable reusable expected delivered kept partial known pulled disk".split()


def ledger(**lengths: Any) -> dict[str, int]:
    """Return the causes with tokens, of a prompt with 100 tokens of which 96 are cacheable."""
    whole = {"cacheable": 96, "reusable": 0, "expected": 0, "delivered": 0, **lengths}
    found = msgspec.structs.asdict(account(100, **whole))
    return {cause: tokens for cause, tokens in found.items() if tokens}


@given(
    TOKENS,
    st.fixed_dictionaries(dict.fromkeys(LENGTHS, TOKENS)),
    st.builds(range, TOKENS, TOKENS),
    st.booleans(),
)
def test_the_causes_add_up_to_the_prompt_for_any_lengths(
    prompt: int, lengths: dict[str, int], broken: range, is_salted: bool
) -> None:
    found = account(prompt, broken=broken, is_salted=is_salted, **lengths)
    tokens = msgspec.structs.astuple(found)
    assert sum(tokens) == prompt
    assert min(tokens) >= 0
    assert found.cached == min(lengths["delivered"], prompt)
    assert found.hit + found.pulled + found.disk + found.stale == min(lengths["expected"], prompt)
    assert not (found.new if is_salted else found.isolated)
    assert found.broken <= len(broken)


def test_an_uncached_prompt_is_new_except_its_tail() -> None:
    assert ledger() == {"new": 96, "tail": 4}


def test_expected_and_delivered_tokens_are_hits() -> None:
    assert ledger(reusable=64, expected=64, delivered=64) == {"hit": 64, "new": 32, "tail": 4}


def test_tokens_from_a_peer_and_from_the_disk_have_their_own_causes() -> None:
    found = ledger(reusable=64, expected=64, delivered=80, pulled=32, disk=16)
    assert found == {
        "hit": 16,
        "pulled": 32,
        "disk": 16,
        "unexpected_hit": 16,
        "new": 16,
        "tail": 4,
    }


def test_expected_tokens_that_were_not_delivered_are_stale() -> None:
    found = ledger(reusable=64, expected=64, delivered=32)
    assert found == {"hit": 32, "stale": 32, "new": 32, "tail": 4}


def test_tokens_cached_on_another_replica_are_spilled() -> None:
    found = ledger(reusable=96, expected=32, delivered=32)
    assert found == {"hit": 32, "spilled": 64, "tail": 4}


def test_unexpected_hits_reduce_the_later_causes() -> None:
    found = ledger(reusable=64, expected=32, delivered=80)
    assert found == {"hit": 32, "unexpected_hit": 48, "new": 16, "tail": 4}


def test_new_tokens_of_a_salted_prompt_are_isolated() -> None:
    found = ledger(reusable=32, expected=32, delivered=32, is_salted=True)
    assert found == {"hit": 32, "isolated": 64, "tail": 4}


def test_tokens_that_were_cached_before_are_evicted() -> None:
    found = ledger(reusable=32, expected=32, delivered=32, known=64)
    assert found == {"hit": 32, "evicted": 32, "new": 32, "tail": 4}


def test_tokens_that_lack_only_windows_or_states_are_partial() -> None:
    found = ledger(reusable=32, expected=32, delivered=32, partial=64, known=80)
    assert found == {"hit": 32, "partial": 32, "evicted": 16, "new": 16, "tail": 4}


def test_evicted_tokens_of_a_salted_prompt_are_not_isolated() -> None:
    assert ledger(known=64, is_salted=True) == {"evicted": 64, "isolated": 32, "tail": 4}


def test_tokens_to_keep_that_no_cache_has_are_unpinned_even_if_they_were_evicted() -> None:
    assert ledger(kept=64) == {"unpinned": 64, "new": 32, "tail": 4}
    assert ledger(kept=64, known=80) == {"unpinned": 64, "evicted": 16, "new": 16, "tail": 4}


def test_tokens_to_keep_that_another_replica_has_cached_are_spilled() -> None:
    assert ledger(reusable=64, kept=64) == {"spilled": 64, "new": 32, "tail": 4}


def test_a_shared_prefix_is_unpinned_under_a_salt_too() -> None:
    assert ledger(kept=64, is_salted=True) == {"unpinned": 64, "isolated": 32, "tail": 4}


def test_text_after_a_change_is_broken_and_changed_or_added_text_is_new() -> None:
    found = ledger(reusable=16, expected=16, delivered=16, known=16, broken=range(24, 80))
    assert found == {"hit": 16, "new": 8 + 16, "broken": 56, "tail": 4}


def test_tokens_that_are_cached_in_spite_of_a_change_are_not_broken() -> None:
    assert ledger(known=64, broken=range(24, 80)) == {
        "evicted": 64,
        "broken": 16,
        "new": 16,
        "tail": 4,
    }
    assert ledger(delivered=96, broken=range(24, 80)) == {"unexpected_hit": 96, "tail": 4}


def test_a_change_breaks_the_prefix_under_a_salt_too() -> None:
    found = ledger(is_salted=True, broken=range(24, 80))
    assert found == {"broken": 56, "isolated": 24 + 16, "tail": 4}


def test_the_tail_is_never_broken() -> None:
    assert ledger(broken=range(90, 120)) == {"new": 90, "broken": 6, "tail": 4}
