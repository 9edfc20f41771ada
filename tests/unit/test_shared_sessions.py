"""Coding agents send one session id for several conversations, such as those of sub-agents."""

from hypothesis import given
from hypothesis import strategies as st

from kvroute.blocks.fingerprint import Fingerprint
from kvroute.router.sessions.returns import Returns, SessionHints

SESSION = SessionHints(session=2**62)


class Agents:
    """Several conversations with one session id, as a router sees them."""

    def __init__(self, count: int) -> None:
        self.returns = Returns()
        self.chains: list[list[Fingerprint]] = [[] for _ in range(count)]
        self._next = 1

    def turn(self, agent: int, hints: SessionHints) -> int:
        """Send the agent's next turn, and return its number."""
        self._next += 1
        chain = self.chains[agent]
        known = len(chain)
        chain.append(Fingerprint(self._next))
        turn = self.returns.retention(chain, known, hints).turn
        self.returns.begin(turn)
        return turn.number


@given(st.lists(st.integers(0, 3)))
def test_the_turns_of_each_agent_are_counted_as_without_an_id(agents: list[int]) -> None:
    named, unnamed = Agents(4), Agents(4)
    for agent in agents:
        number = named.turn(agent, SESSION)
        assert number == unnamed.turn(agent, SessionHints()) == len(named.chains[agent])
    assert named.returns.counts == unnamed.returns.counts


def test_a_session_id_finds_the_earlier_turn_although_its_blocks_are_forgotten() -> None:
    agents = Agents(1)
    assert agents.turn(0, SESSION) == 1
    chain = [*agents.chains[0], Fingerprint(99)]
    assert agents.returns.retention(chain, 0, SESSION).turn.number == 2
    assert agents.returns.retention(chain, 0, SessionHints()).turn.number == 1
