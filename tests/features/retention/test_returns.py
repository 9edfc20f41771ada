"""It is counted how often conversations continue."""

import random
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute.blocks.fingerprint import Fingerprint
from kvroute.contract.generation import NO_TOKENS, GenerateRequest
from kvroute.contract.keep import Order, RetentionHint, SessionTurn
from kvroute.features.placing_feature import PlacingFeatures
from kvroute.features.retention import returns as module
from kvroute.features.retention.returns import BATCH_SESSION, ENDED, Returns
from kvroute.router.placement.attempts import Placement, RequestContext
from kvroute.router.placement.fleet import Fleet
from kvroute.router.sessions.turns import NO_HINTS, SessionHints

LAST = SessionHints(is_end=True)
TOOLS = SessionHints(has_tools=True)


class Chats:
    """Conversations in which each turn adds one block."""

    def __init__(self) -> None:
        self.returns = Returns()
        self.fleet = Fleet(
            model="m",
            revision="",
            block_size=16,
            rng=random.Random(0),
            features=PlacingFeatures([self.returns]),
        )
        self._fresh = count(1)

    def turn(
        self, before: list[Fingerprint], hints: SessionHints = NO_HINTS, *, times: int = 1
    ) -> tuple[list[Fingerprint], RequestContext]:
        chain = [*before, Fingerprint(next(self._fresh))]
        tokens = 16 * len(chain) + 1
        placement = Placement((), tuple(chain), 0, tokens, 16, known_blocks=len(before))
        context = self.fleet.recognise(placement, RequestContext(hints=hints))
        assert context.turn is not None
        for _ in range(times):
            self.fleet.turns.begin(context.turn)
        return chain, context

    def talk(self, turns: int, hints: SessionHints = NO_HINTS) -> None:
        chain: list[Fingerprint] = []
        for _ in range(turns):
            chain, _ = self.turn(chain, hints)

    def first(self, hints: SessionHints = NO_HINTS) -> Order:
        """Return the retention of a conversation's first turn."""
        return order(self.turn([], hints)[1])


def order(context: RequestContext) -> Order:
    assert context.keep is not None
    return context.keep.order


def test_first_turns_that_seldom_return_are_less_likely_than_later_ones() -> None:
    chats = Chats()
    for number in range(200):
        chats.talk(6 if number % 5 == 0 else 1)
    assert chats.first() == Order.UNLIKELY
    chain: list[Fingerprint] = []
    for _ in range(4):
        chain, later = chats.turn(chain)
    assert order(later) == Order.USUAL


def test_first_turns_with_tools_are_a_kind_of_their_own() -> None:
    chats = Chats()
    for _ in range(100):
        chats.talk(1)
        chats.talk(4, TOOLS)
    assert (chats.first(), chats.first(TOOLS)) == (Order.UNLIKELY, Order.USUAL)


def test_a_promised_return_makes_any_turn_usual_except_the_last_one() -> None:
    chats = Chats()
    for number in range(200):
        chats.talk(6 if number % 5 == 0 else 1)
    assert chats.first(SessionHints(is_promised=True)) == Order.USUAL
    assert chats.first(SessionHints(is_promised=True, is_end=True)) == Order.ENDED


def test_without_counts_all_turns_are_usual() -> None:
    assert Chats().first() == Chats().first(TOOLS) == Order.USUAL


def test_ends_are_trusted_until_too_many_are_wrong() -> None:
    chats = Chats()
    for _ in range(50):
        chats.turn([], LAST)
    assert chats.first(LAST) == Order.ENDED
    assert chats.returns.trusts_ends
    for _ in range(50):
        chain, _ = chats.turn([], LAST)
        chats.turn(chain)
    assert chats.first(LAST) == Order.UNLIKELY
    assert not chats.returns.trusts_ends


def test_an_end_after_the_last_turn_counts_as_an_end() -> None:
    chats, named = Chats(), SessionHints(session=7)
    chain, _ = chats.turn([], named)
    chain, _ = chats.turn(chain, named)
    for _ in range(2):
        chats.fleet.end_session(7)
    assert chats.returns.counts.sent[ENDED] == 1.0
    _, back = chats.turn(chain, named)
    assert back.evicted_why == "ended"
    assert chats.returns.counts.returned[ENDED] == 1.0


def test_the_reason_for_the_eviction_follows_from_the_earlier_turn() -> None:
    chats = Chats()
    for number in range(200):
        chats.talk(6 if number % 5 == 0 else 1)
    once, _ = chats.turn([])
    twice, _ = chats.turn(chats.turn([])[0])
    for _ in range(3):
        twice, _ = chats.turn(twice)
    ended, _ = chats.turn([], LAST)
    assert chats.turn(once)[1].evicted_why == "unlikely"
    assert chats.turn(twice)[1].evicted_why == "usual"
    assert chats.turn(ended)[1].evicted_why == "ended"
    assert chats.turn([])[1].evicted_why == "usual"


TURNS = st.lists(st.tuples(st.integers(0, 5), st.booleans(), st.booleans()), max_size=40)


@given(TURNS)
def test_a_turn_that_is_sent_twice_counts_once(turns: list[tuple[int, bool, bool]]) -> None:
    """A request may be sent again, and a message about it may arrive twice."""
    once, twice = Chats(), Chats()
    for chats, times in ((once, 1), (twice, 2)):
        chains: dict[int, list[Fingerprint]] = {}
        for which, has_tools, is_end in turns:
            hints = SessionHints(is_end=is_end, has_tools=has_tools)
            chains[which], _ = chats.turn(chains.get(which, []), hints, times=times)
    assert once.returns.counts == twice.returns.counts


@given(TURNS)
def test_counts_add_up(turns: list[tuple[int, bool, bool]]) -> None:
    chats, chains = Chats(), dict[int, list[Fingerprint]]()
    for which, has_tools, is_end in turns:
        hints = SessionHints(is_end=is_end, has_tools=has_tools)
        chains[which], _ = chats.turn(chains.get(which, []), hints)
    assert sum(chats.returns.counts.sent) == len(turns)
    assert sum(chats.returns.counts.returned) == len(turns) - len(chains)


def test_older_turns_count_less(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_COUNTED", 100)
    chats = Chats()
    for _ in range(300):
        chats.talk(1)
    assert chats.first() == Order.UNLIKELY
    for _ in range(100):
        chats.talk(4)
    assert chats.first() == Order.USUAL
    assert sum(chats.returns.counts.sent) <= 100


@pytest.mark.parametrize(
    ("order", "is_named", "hint"),
    [
        (Order.USUAL, True, RetentionHint(Order.UNLIKELY, 5)),
        (Order.ENDED, True, RetentionHint(Order.ENDED, 5)),
        (Order.USUAL, False, RetentionHint(Order.ENDED, BATCH_SESSION)),
    ],
)
def test_the_blocks_of_batch_requests_are_evicted_earlier(
    order: Order, is_named: bool, hint: RetentionHint
) -> None:
    keep, turn = RetentionHint(order, 5), SessionTurn(Fingerprint(1), 5, 1, is_named=is_named)
    for is_in_lane, expected in ((False, keep), (True, hint)):
        context = RequestContext(turn=turn, keep=keep, is_in_lane=is_in_lane)
        attempt: Any = SimpleNamespace(context=context)
        assert Returns().sending(GenerateRequest("r", NO_TOKENS), attempt).keep == expected
