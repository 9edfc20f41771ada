"""The kinds of text that change by themselves in prompts, such as dates."""

import pytest

from kvroute.features.changes.router_changes import kind_of


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("<total_tokens>89023 tokens left</total_tokens>", "a count of the tokens that are left"),
        ("The time is 2026-11-26 14:03:22.", "a time of day"),
        ("Today's date: 2026-11-26.", "a date"),
        ("Today is Thursday, 26 November 2026", "a date"),
        ("Today is 11/26/2026.", "a date"),
        ("session 8b2e9a0f-6c1d-4c58-9a90-3fd1c2a4b5e6", "an identifier"),
        ("commit 9e5c1271af0c", "an identifier"),
        ("This is request 17.", "a number"),
        ("You are a careful lawyer.", ""),
        ("the added facade was effaced", ""),
    ],
)
def test_the_kind_is_named(text: str, kind: str) -> None:
    assert kind_of(text) == kind
