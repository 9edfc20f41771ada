"""Conversations are recognised by their prompts.

Coding agents send one session id for several conversations, such as those of sub-agents.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute.blocks.fingerprint import Fingerprint
from kvroute.contract.keep import NO_BLOCK, SessionTurn
from kvroute.router.sessions import turns as module
from kvroute.router.sessions.turns import NO_HINTS, SessionHints, Turns

SESSION = SessionHints(session=2**62)


class Agents:
    """Several conversations with one session id, as a router sees them."""

    def __init__(self, count: int) -> None:
        self.turns = Turns()
        self.chains: list[list[Fingerprint]] = [[] for _ in range(count)]
        self._next = 1

    def turn(self, agent: int, hints: SessionHints = NO_HINTS) -> SessionTurn:
        """Send the agent's next turn."""
        self._next += 1
        chain = self.chains[agent]
        known = len(chain)
        chain.append(Fingerprint(self._next))
        turn, _ = self.turns.find(chain, known, hints)
        self.turns.begin(turn)
        return turn


@given(st.lists(st.integers(0, 3)))
def test_the_turns_of_each_agent_are_counted_as_without_an_id(agents: list[int]) -> None:
    named, unnamed = Agents(4), Agents(4)
    for agent in agents:
        number = named.turn(agent, SESSION).number
        assert number == unnamed.turn(agent).number == len(named.chains[agent])
    assert len(named.turns) == len(unnamed.turns) == len(set(agents))


def test_a_session_id_finds_the_earlier_turn_although_its_blocks_are_forgotten() -> None:
    agents = Agents(1)
    assert agents.turn(0, SESSION).number == 1
    chain = [*agents.chains[0], Fingerprint(99)]
    assert agents.turns.find(chain, 0, SESSION)[0].number == 2
    assert agents.turns.find(chain, 0, NO_HINTS)[0].number == 1


def test_turns_of_a_conversation_are_numbered_and_have_one_session() -> None:
    chats = Agents(2)
    first, second, third, other = (chats.turn(chat) for chat in (0, 0, 0, 1))
    assert [turn.number for turn in (first, second, third, other)] == [1, 2, 3, 1]
    assert first.session == second.session == third.session != other.session


def test_the_number_of_remembered_turns_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_ENDS", 10)
    chats = Agents(30)
    for chat in range(30):
        chats.turn(chat, SessionHints(1 + chat))
    assert len(chats.turns) == len(chats.turns._sessions) == 10


def test_a_turn_without_a_full_block_is_not_recorded() -> None:
    turns = Turns()
    turns.begin(SessionTurn(NO_BLOCK, 0, 1))
    assert len(turns) == 0


def test_equal_prompts_belong_to_different_conversations() -> None:
    chats = Agents(1)
    first = chats.turn(0)
    again, _ = chats.turns.find(chats.chains[0], 1, NO_HINTS)
    assert again.number == first.number
    assert again.session != first.session


def test_only_a_client_can_use_its_session_id() -> None:
    chats = Agents(1)
    named, unnamed = chats.turn(0, SessionHints(session=7)), chats.turn(0)
    assert (named.session, unnamed.number) == (7, 2)
    assert unnamed.session != 7


def test_shared_blocks_do_not_identify_a_conversation() -> None:
    chats = Agents(1)
    chats.turn(0)
    own = [*chats.chains[0], Fingerprint(99)]
    assert chats.turns.find(own, 1, NO_HINTS, shared_blocks=1)[0].number == 1
    assert chats.turns.find(own, 1, NO_HINTS)[0].number == 2


def test_only_an_end_that_was_not_known_has_a_last_turn() -> None:
    chats = Agents(2)
    turn = chats.turn(0, SessionHints(session=7))
    chats.turn(1, SessionHints(session=8, is_end=True))
    assert [chats.turns.end(session) for session in (7, 7, 8, 9)] == [turn, None, None, None]
