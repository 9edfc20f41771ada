"""Routers that hear each other learn the same of conversations, whoever has which turn."""

import random
from itertools import count

from hypothesis import given, settings
from hypothesis import strategies as st

from kvroute.blocks.fingerprint import Fingerprint
from kvroute.router.connections.peers import PeerPublisher, PeerSubscriber
from kvroute.router.placement.attempts import Outcome, RequestContext
from kvroute.router.placement.fleet import Fleet
from kvroute.router.sessions.returns import Counts, Said

CLOCK = count(1)
TURNS = st.lists(
    st.tuples(
        st.integers(0, 2),  # router
        st.integers(0, 3),  # conversation
        st.sampled_from(["ok", "cancelled", "moved"]),
        st.booleans(),  # with a tool call
        st.booleans(),  # its client says that it is the last
        st.booleans(),  # its client ends the session then
    ),
    max_size=25,
)


class Router:
    def __init__(self) -> None:
        self.now_s = 0.0
        self.publisher = PeerPublisher(clock=lambda: self.now_s)
        self.fleet = Fleet(
            model="m", revision="", block_size=32, rng=random.Random(0), observer=self.publisher
        )
        self.subscriber = PeerSubscriber(
            self.fleet, own=self.publisher.router, clock=lambda: self.now_s
        )

    @property
    def counts(self) -> Counts:
        return self.fleet.returns.counts

    def turn(
        self,
        chain: list[Fingerprint],
        known: int,
        said: Said,
        outcomes: list[Outcome],
        is_tool: bool,
    ) -> None:
        retention = self.fleet.returns.retention(chain, known, said, self.now_s)
        placement = self.fleet.place_chain(chain, 32 * len(chain) + 1, ["a", "b"], self.now_s)
        context = RequestContext(self.now_s, said=said, retention=retention)
        for outcome in outcomes:
            attempt = self.fleet.sent(placement, "a", f"{next(CLOCK)}", self.now_s, context)
            attempt.is_tool_call = is_tool and outcome != "moved"
            attempt.last_chunk_s = self.now_s
            attempt.end(outcome)

    def end(self, session: int) -> None:
        self.fleet.returns.end(session)
        self.publisher.session_ended(session)


@settings(max_examples=50)
@given(TURNS)
def test_all_routers_learn_the_same(
    turns: list[tuple[int, int, Outcome, bool, bool, bool]],
) -> None:
    routers, fresh = [Router() for _ in range(3)], count(1)
    chains: dict[int, list[Fingerprint]] = {}
    for now_s, (number, name, outcome, is_tool, is_last, is_ended) in enumerate(turns):
        for router in routers:
            router.now_s = float(now_s)
        before = chains.get(name, [])
        chains[name] = [*before, Fingerprint(next(fresh))]
        outcomes: list[Outcome] = ["moved", "ok"] if outcome == "moved" else [outcome]
        sender = routers[number]
        sender.turn(chains[name], len(before), Said(name + 1, is_last), outcomes, is_tool)
        if is_ended:
            sender.end(name + 1)
        message = sender.publisher.take()
        for router in routers:
            router.subscriber.receive(message)
    assert routers[0].counts == routers[1].counts == routers[2].counts
    assert round(sum(routers[0].counts.sent)) == len(turns)
