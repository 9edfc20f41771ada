"""Conversations are recognised by their prompts, and how often they go on is learned."""

from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute.blocks.fingerprint import Fingerprint
from kvroute.contract.keep import Keep, SessionTurn
from kvroute.router.sessions import returns as module
from kvroute.router.sessions.returns import (
    BUCKETS,
    ENDED,
    NOTHING_SAID,
    Counts,
    Retention,
    Returns,
    Said,
    decode_counts,
    encode_counts,
)

LAST = Said(is_end=True)


class Chats:
    """Conversations whose turns add a block each."""

    def __init__(self) -> None:
        self.returns = Returns()
        self.now_s = 0.0
        self._fresh = count(1)

    def turn(
        self,
        before: list[Fingerprint],
        *,
        said: Said = NOTHING_SAID,
        is_tool_call: bool = False,
        times: int = 1,
    ) -> tuple[list[Fingerprint], Retention]:
        chain = [*before, Fingerprint(next(self._fresh))]
        retention = self.returns.retention(chain, len(before), said, self.now_s)
        for _ in range(times):
            self.returns.begin(retention.turn, retention.keep, self.now_s)
        self.now_s += 1.0
        for _ in range(times):
            self.returns.finish(retention.turn, is_tool_call=is_tool_call, now_s=self.now_s)
        return chain, retention

    def talk(self, turns: int, *, said: Said = NOTHING_SAID, is_tool_call: bool = False) -> None:
        chain: list[Fingerprint] = []
        for _ in range(turns):
            chain, _ = self.turn(chain, said=said, is_tool_call=is_tool_call)
            self.now_s += 10.0

    @property
    def next_keep(self) -> Keep:
        """Of a conversation's first turn."""
        return self.turn([])[1].keep


def test_turns_of_a_conversation_are_numbered_and_have_one_session() -> None:
    chats = Chats()
    chain, first = chats.turn([])
    chain, second = chats.turn(chain)
    _, third = chats.turn(chain)
    _, other = chats.turn([])
    assert [each.turn.number for each in (first, second, third, other)] == [1, 2, 3, 1]
    assert first.turn.session == second.turn.session == third.turn.session != other.turn.session


def test_first_turns_that_seldom_come_back_are_less_likely_than_later_ones() -> None:
    chats = Chats()
    for number in range(200):
        chats.talk(6 if number % 5 == 0 else 1)
    _, first = chats.turn([])
    assert first.keep.chance < 0.5
    chain: list[Fingerprint] = []
    for _ in range(4):
        chain, later = chats.turn(chain)
    assert later.keep.chance > 0.9


def test_while_nothing_is_known_all_turns_are_alike() -> None:
    assert Chats().next_keep.chance == 1.0
    assert Chats().next_keep.tool_s == 0.0


@pytest.mark.parametrize(("gap_s", "kept_s"), [(3.0, 4.0), (50.0, 64.0), (1000.0, 1024.0)])
def test_a_tool_call_is_waited_for_as_long_as_most_take(gap_s: float, kept_s: float) -> None:
    chats = Chats()
    for _ in range(50):
        chain, _ = chats.turn([], is_tool_call=True)
        chats.now_s += gap_s
        chats.turn(chain)
    assert chats.next_keep.tool_s == kept_s


def test_tool_calls_that_nobody_answers_are_not_waited_for() -> None:
    chats = Chats()
    for number in range(50):
        chain, _ = chats.turn([], is_tool_call=True)
        if number % 10 == 0:
            chats.turn(chain)
    assert chats.next_keep.tool_s == 0.0


def test_a_told_end_is_believed_until_too_many_are_wrong() -> None:
    chats = Chats()
    for _ in range(50):
        chats.turn([], said=LAST)
    assert chats.turn([], said=LAST)[1].keep.chance == 0.0
    for _ in range(50):
        chain, _ = chats.turn([], said=LAST)
        chats.turn(chain)
    assert chats.turn([], said=LAST)[1].keep.chance > 0.0


def test_an_end_that_is_told_later_counts_as_one() -> None:
    chats, named = Chats(), Said(session=7)
    chain, _ = chats.turn([], said=named)
    chain, _ = chats.turn(chain, said=named)
    chats.returns.end(7)
    assert chats.returns.counts.sent[ENDED] == 1.0
    _, back = chats.turn(chain, said=named)
    assert back.lost == "ended"
    assert chats.returns.counts.returned[ENDED] == 1.0


def test_an_end_that_is_told_hours_later_takes_no_other_turn_away() -> None:
    chats = Chats()
    for session in range(1, 31):
        chats.turn([], said=Said(session))
    chats.now_s += 4 * module.HALF_LIFE_S
    for _ in range(20):
        chats.turn([])
    for session in range(1, 31):
        chats.returns.end(session)
    assert chats.returns.counts.sent[0] == pytest.approx(20, abs=0.5)


def test_why_blocks_are_gone() -> None:
    chats = Chats()
    promised, _ = chats.turn([], said=Said(promise_s=60.0))
    ended, _ = chats.turn([], said=LAST)
    plain, _ = chats.turn([])
    assert [chats.turn(chain)[1].lost for chain in (promised, ended, plain)] == [
        "promised",
        "ended",
        "usual",
    ]
    late, _ = chats.turn([], said=Said(promise_s=60.0))
    chats.now_s += 100.0
    assert chats.turn(late)[1].lost == "usual"


def test_what_is_gone_within_a_learned_wait_was_not_promised() -> None:
    chats = Chats()
    for _ in range(50):
        chain, _ = chats.turn([], is_tool_call=True)
        chats.now_s += 50.0
        chats.turn(chain)
    waiting, _ = chats.turn([], is_tool_call=True)
    assert chats.next_keep.after_tool_call.still_s > 1.0
    assert chats.turn(waiting)[1].lost == "usual"
    said, _ = chats.turn([], said=Said(promise_s=60.0), is_tool_call=True)
    assert chats.turn(said)[1].lost == "promised"


TURNS = st.lists(st.tuples(st.integers(0, 5), st.booleans(), st.booleans()), max_size=40)


@given(TURNS)
def test_a_turn_that_is_told_twice_counts_once(turns: list[tuple[int, bool, bool]]) -> None:
    """A request that is sent again, and messages that come twice."""
    once, twice = Chats(), Chats()
    for chats, times in ((once, 1), (twice, 2)):
        chains: dict[int, list[Fingerprint]] = {}
        for which, is_tool_call, is_end in turns:
            chains[which], _ = chats.turn(
                chains.get(which, []),
                is_tool_call=is_tool_call,
                said=Said(is_end=is_end),
                times=times,
            )
    assert once.returns.counts == twice.returns.counts


@given(TURNS)
def test_counts_add_up(turns: list[tuple[int, bool, bool]]) -> None:
    chats, chains = Chats(), dict[int, list[Fingerprint]]()
    for which, is_tool_call, is_end in turns:
        chains[which], retention = chats.turn(
            chains.get(which, []), is_tool_call=is_tool_call, said=Said(is_end=is_end)
        )
        assert 0.0 <= retention.keep.chance <= 1.0
    counts = chats.returns.counts
    assert sum(counts.sent) == pytest.approx(len(turns))
    assert sum(counts.returned) == pytest.approx(len(turns) - len(chains))
    assert sum(counts.gaps) == pytest.approx(sum(counts.returned[BUCKETS:ENDED]))


def test_only_so_many_turns_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ENDS", 10)
    chats = Chats()
    for _ in range(30):
        chats.talk(3)
    assert len(chats.returns) == 10
    assert len(chats.returns._sessions) <= 10


def test_what_was_learned_fades() -> None:
    chats = Chats()
    chats.talk(10)
    before = sum(chats.returns.counts.sent)
    chats.now_s += 10 * module.HALF_LIFE_S
    chats.turn([])
    assert sum(chats.returns.counts.sent) < 1 + before / 500


def test_what_was_learned_is_read_as_it_was_written() -> None:
    chats = Chats()
    chats.talk(5, is_tool_call=True)
    packed = encode_counts(chats.returns.counts)
    assert decode_counts(packed) == chats.returns.counts
    both = Counts()
    both.add(decode_counts(packed))
    assert both == chats.returns.counts


def test_a_turn_without_a_block_is_none() -> None:
    returns = Returns()
    returns.begin(SessionTurn(Fingerprint(0), 0, 1), Keep(), 0.0)
    assert len(returns) == 0


def test_what_was_learned_before_a_start_counts_after_the_first_turn() -> None:
    chats = Chats()
    chats.now_s = 5000.0
    chats.returns.counts.sent[0] = 100.0
    chats.turn([])
    assert chats.returns.counts.sent[0] == 101.0


def test_equal_prompts_are_of_different_conversations() -> None:
    chats = Chats()
    chain, first = chats.turn([])
    again = chats.returns.retention(chain, len(chain), NOTHING_SAID, chats.now_s)
    assert again.turn.number == first.turn.number
    assert again.turn.session != first.turn.session


def test_a_name_is_its_clients_own() -> None:
    chats = Chats()
    chain, named = chats.turn([], said=Said(session=7))
    _, unnamed = chats.turn(chain)
    assert (named.turn.session, unnamed.turn.number) == (7, 2)
    assert unnamed.turn.session != 7


def test_no_conversation_goes_on_from_what_is_everybodys() -> None:
    chats = Chats()
    shared, _ = chats.turn([])
    own = [*shared, Fingerprint(99)]
    there = chats.returns.retention(own, 1, NOTHING_SAID, 0.0, shared_blocks=1)
    assert there.turn.number == 1
    assert chats.returns.retention(own, 1, NOTHING_SAID, 0.0).turn.number == 2


def test_a_learned_wait_for_a_tool_is_no_promise() -> None:
    chats = Chats()
    for _ in range(50):
        chain, _ = chats.turn([], is_tool_call=True)
        chats.turn(chain)
    chain, waiting = chats.turn([], is_tool_call=True)
    assert waiting.keep.tool_s > 0
    assert chats.turn(chain)[1].lost == "usual"


def test_a_request_that_moves_on_is_where_it_was_sent_last() -> None:
    returns = Returns()
    turn, keep, _ = returns.retention([Fingerprint(1)], 0, Said(session=7), 0.0)
    returns.begin(turn, keep, 0.0, "full")
    returns.begin(turn, keep, 0.0, "roomy")
    assert returns.home(7) == "roomy"


def test_an_end_during_a_turn_is_counted_once() -> None:
    returns = Returns()
    turn, keep, _ = returns.retention([Fingerprint(1)], 0, Said(session=7), 0.0)
    returns.begin(turn, keep, 0.0)
    returns.end(7)
    returns.begin(turn, keep, 0.0)
    returns.finish(turn, is_tool_call=True, now_s=1.0)
    assert returns.counts.sent[ENDED] == sum(returns.counts.sent) == 1.0
