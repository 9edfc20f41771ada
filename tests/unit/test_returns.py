"""Conversations are recognised by their prompts, and it is counted how often they continue."""

from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute.blocks.fingerprint import Fingerprint
from kvroute.contract.keep import Order, SessionTurn
from kvroute.router.sessions import returns as module
from kvroute.router.sessions.returns import ENDED, NO_HINTS, Retention, Returns, SessionHints

LAST = SessionHints(is_end=True)
TOOLS = SessionHints(has_tools=True)


class Chats:
    """Conversations in which each turn adds one block."""

    def __init__(self) -> None:
        self.returns = Returns()
        self._fresh = count(1)

    def turn(
        self, before: list[Fingerprint], hints: SessionHints = NO_HINTS, *, times: int = 1
    ) -> tuple[list[Fingerprint], Retention]:
        chain = [*before, Fingerprint(next(self._fresh))]
        retention = self.returns.retention(chain, len(before), hints)
        for _ in range(times):
            self.returns.begin(retention.turn)
        return chain, retention

    def talk(self, turns: int, hints: SessionHints = NO_HINTS) -> None:
        chain: list[Fingerprint] = []
        for _ in range(turns):
            chain, _ = self.turn(chain, hints)

    def first(self, hints: SessionHints = NO_HINTS) -> Order:
        """Return the retention of a conversation's first turn."""
        return self.turn([], hints)[1].keep.order


def test_turns_of_a_conversation_are_numbered_and_have_one_session() -> None:
    chats = Chats()
    chain, first = chats.turn([])
    chain, second = chats.turn(chain)
    _, third = chats.turn(chain)
    _, other = chats.turn([])
    assert [retention.turn.number for retention in (first, second, third, other)] == [1, 2, 3, 1]
    assert first.turn.session == second.turn.session == third.turn.session != other.turn.session


def test_first_turns_that_seldom_return_are_less_likely_than_later_ones() -> None:
    chats = Chats()
    for number in range(200):
        chats.talk(6 if number % 5 == 0 else 1)
    assert chats.first() == Order.UNLIKELY
    chain: list[Fingerprint] = []
    for _ in range(4):
        chain, later = chats.turn(chain)
    assert later.keep.order == Order.USUAL


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
        chats.returns.end(7)
    assert chats.returns.counts.sent[ENDED] == 1.0
    _, back = chats.turn(chain, named)
    assert back.lost == "ended"
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
    assert chats.turn(once)[1].lost == "unlikely"
    assert chats.turn(twice)[1].lost == "usual"
    assert chats.turn(ended)[1].lost == "ended"
    assert chats.turn([])[1].lost == "usual"


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


def test_the_number_of_remembered_turns_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_ENDS", 10)
    chats = Chats()
    for _ in range(30):
        chats.talk(3)
    assert len(chats.returns) == 10
    assert len(chats.returns._sessions) <= 10


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


def test_a_turn_without_a_full_block_is_not_recorded() -> None:
    returns = Returns()
    returns.begin(SessionTurn(Fingerprint(0), 0, 1))
    assert len(returns) == 0


def test_equal_prompts_belong_to_different_conversations() -> None:
    chats = Chats()
    chain, first = chats.turn([])
    again = chats.returns.retention(chain, len(chain), NO_HINTS)
    assert again.turn.number == first.turn.number
    assert again.turn.session != first.turn.session


def test_only_a_client_can_use_its_session_id() -> None:
    chats = Chats()
    chain, named = chats.turn([], SessionHints(session=7))
    _, unnamed = chats.turn(chain)
    assert (named.turn.session, unnamed.turn.number) == (7, 2)
    assert unnamed.turn.session != 7


def test_shared_blocks_do_not_identify_a_conversation() -> None:
    chats = Chats()
    shared, _ = chats.turn([])
    own = [*shared, Fingerprint(99)]
    there = chats.returns.retention(own, 1, NO_HINTS, shared_blocks=1)
    assert there.turn.number == 1
    assert chats.returns.retention(own, 1, NO_HINTS).turn.number == 2
