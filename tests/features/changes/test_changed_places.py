"""The places where chats' prompts change, in the order of the cached tokens that they lose."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from kvroute.features.changes.changed_places import KEPT, WORST, PromptChanges
from kvroute.router.observability.rolling_window import BUCKET_S, WINDOW_S
from kvroute.router.sessions.breaks import Break, Difference, Span

SPAN = Span(4, "0a")
ROLES = ["system", "user", "tools"]


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def at(token: int, role: str = "system") -> Break:
    return Break(role, 0, Difference(token, SPAN, SPAN, common=100))


def worst(places: PromptChanges) -> list[tuple[str, int, int, int]]:
    """Return role, token, lost tokens and requests of each place."""
    names = ("role", "token", "tokens", "requests")
    return [tuple(place[name] for name in names) for place in places.worst()]


def test_changes_near_each_other_are_one_place_that_begins_with_the_first() -> None:
    places = PromptChanges(Clock())
    for token in (1217, 1216, 1220):
        places.add(at(token), 100)
    assert worst(places) == [("system", 1216, 300, 3)]


def test_the_costliest_place_comes_first_and_roles_are_separate() -> None:
    places = PromptChanges(Clock())
    places.add(at(10), 100)
    places.add(at(10, "tools"), 300)
    places.add(at(5000), 200)
    assert worst(places) == [
        ("tools", 10, 300, 1),
        ("system", 5000, 200, 1),
        ("system", 10, 100, 1),
    ]


def test_changes_older_than_the_window_are_forgotten() -> None:
    clock = Clock()
    places = PromptChanges(clock)
    places.add(at(10), 100)
    clock.now_s += WINDOW_S / 2
    places.add(at(10), 50)
    assert worst(places) == [("system", 10, 150, 2)]
    clock.now_s += WINDOW_S / 2 + BUCKET_S
    assert worst(places) == [("system", 10, 50, 1)]
    clock.now_s += WINDOW_S
    assert worst(places) == []


@given(st.lists(st.tuples(st.sampled_from(ROLES), st.integers(0, 10**6)), max_size=200))
def test_the_numbers_of_kept_and_shown_places_are_limited(
    changes: list[tuple[str, int]],
) -> None:
    clock = Clock()
    places = PromptChanges(clock)
    for (role, token), moved_s in zip(changes, itertools.cycle((0.0, 0.1, 6.0))):
        clock.now_s += moved_s
        places.add(at(token, role), 1)
    assert len(worst(places)) <= WORST
    assert all(len(part.places) <= KEPT for part in places._window.parts())
    assert len(places._window.parts()) <= WINDOW_S / BUCKET_S
    assert sum(tokens for _, _, tokens, _ in worst(places)) <= len(changes)
