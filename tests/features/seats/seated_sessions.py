"""Sessions that may have to wait for a seat: the permission to send (kvroute/features/seats)."""

import itertools

from kvroute.blocks.fingerprint import Fingerprint
from kvroute.contract.keep import NO_BLOCK, SessionTurn
from kvroute.features.seats.seats import Seats, SeatWaiter

CAPACITY = 1000  # size of the caches in tokens
MANY = 2000  # number of requests that is enough for all moving averages to converge

numbers = itertools.count(1)


class Sessions:
    """Sessions that send their turns through one router, or several that exchange messages.

    Args:
        most: A fixed number of seats. None: while the cache is too small, as many as fit.
        routers: The number of routers.
    """

    def __init__(self, most: int | None = None, routers: int = 1) -> None:
        self.now_s = 0.0
        self.routers = [Seats[int](lambda: CAPACITY, most) for _ in range(routers)]
        self.seats = self.routers[0]
        self.ends: dict[int, Fingerprint] = {}  # session -> last block of its latest turn
        self.turns: dict[int, int] = {}
        self.running: list[int] = []  # session of each running request

    def thrash(self) -> None:
        """Record many requests that found all replicas busy and the caches too small."""
        for seats in self.routers:
            for _ in range(MANY):
                seats.observe(is_busy=True, pressure=1.0)

    def begin(self, session: int, tokens: int, tenant: int = 0) -> None:
        """Send a session's first turn, and end it at once."""
        waiter = self.waiter(session, tokens, tenant)
        assert self.seats.can_send(waiter, self.now_s)
        self.send(waiter)
        self.end(session)

    def waiter(self, session: int, tokens: int, tenant: int = 0) -> SeatWaiter[int]:
        end = Fingerprint(next(numbers))
        before = self.ends.get(session, NO_BLOCK)
        turn = SessionTurn(end, session, self.turns.get(session, 0) + 1, before, tenant=tenant)
        return SeatWaiter(session, self.now_s, turn, tokens)

    def ask(self, session: int, tokens: int, tenant: int = 0, router: int = 0) -> bool:
        """Send the next turn, or let it wait. Return whether it was sent."""
        seats, waiter = self.routers[router], self.waiter(session, tokens, tenant)
        if not seats.can_send(waiter, self.now_s):
            seats.add(waiter)
            self.report()
            return False
        self.send(waiter)
        return True

    def send(self, waiter: SeatWaiter[int]) -> None:
        self.ends[waiter.session] = waiter.turn.end
        self.turns[waiter.session] = waiter.turn.number
        self.running.append(waiter.session)
        for seats in self.routers:
            seats.sent(waiter.turn, waiter.tokens, cached=(NO_BLOCK, 0), now_s=self.now_s)

    def end(self, session: int) -> None:
        self.running.remove(session)
        for seats in self.routers:
            seats.ended(session, self.now_s)

    def report(self) -> None:
        for number, seats in enumerate(self.routers):
            for other in self.routers:
                if other is not seats:
                    other.receive(f"{number}", seats.report(self.now_s), self.now_s)

    def seated(self, router: int = 0) -> list[int]:
        """Send all turns that have got a seat, and return their sessions in order."""
        sessions, seats = [], self.routers[router]
        while waiter := seats.due(self.now_s):
            self.send(waiter)
            sessions.append(waiter.session)
            self.report()
        return sessions
