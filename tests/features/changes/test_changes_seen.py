"""The doctor and a figure show what chats cost that change before their end."""

from typing import Any

from kvroute.doctor.checks import Check
from kvroute.features.changes.change_checks import changes, figures


def lost(*places: tuple[str, int, int], requests: int = 100, kind: str = "") -> dict[str, Any]:
    """Return the state after chats of 1,000 tokens changed at (role, token, missed tokens)."""
    names = ("role", "token", "tokens")
    return {
        "requests": requests,
        "prompt_tokens": 1000,
        "lost_tokens": sum(tokens for _, _, tokens in places),
        "places": [dict(zip(names, place, strict=True)) | {"kind": kind} for place in places],
    }


def checked(*places: tuple[str, int, int], kind: str = "") -> list[Check]:
    return [*changes([lost(*places, kind=kind)])]


def test_chats_that_change_near_their_beginning_are_a_warning_with_the_place() -> None:
    (check,) = checked(("system", 1203, 120), kind="a date")
    assert (check.name, check.grade) == ("hits", "warning")
    assert check.finding == (
        "12% of prompt tokens missed the cache because chats change at token 1,203, "
        "in the system message: a date"
    )
    assert "last user message" in check.remedy


def test_large_places_are_reported_separately_and_small_ones_together() -> None:
    two = checked(("tools", 50, 110), ("user", 900, 70), ("tool", 9, 20))
    assert ["tools" in check.finding for check in two] == [True, False]
    assert "the same tools" in two[0].remedy
    (many,) = checked(*(("system", n * 100, 40) for n in range(3)))
    assert many.finding.startswith(
        "12% of prompt tokens missed the cache because chats change at many"
    )


def test_few_misses_and_few_requests_are_not_judged() -> None:
    assert checked(("system", 1203, 30)) == []
    assert [*changes([lost(("system", 1203, 120), requests=3)])] == []


def test_a_figure_names_the_place_that_costs_most() -> None:
    assert figures(lost()) == []
    (figure,) = figures(lost(("system", 1203, 120)))
    assert (figure.value, figure.is_bad) == ("12%", True)
    assert figure.note == "most of it at token 1,203, in the system message"
