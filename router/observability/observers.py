"""Forwards what happens to a request to several observers."""

from collections.abc import Iterator

from kvroute.contract.priority import Priority
from kvroute.features.own_methods import own_methods
from kvroute.router.admission.waits import TakenBack, Wait
from kvroute.router.placement.attempts import Attempt, Placement, RequestObserver


class RequestObservers(RequestObserver):
    """Forwards each event to the observers that do not ignore it. Most ignore most events."""

    def __init__(self, *observers: RequestObserver) -> None:
        self._observers = [*_flat(observers)]
        self._placed = own_methods(self._observers, RequestObserver.placed)
        self._waited = own_methods(self._observers, RequestObserver.waited)
        self._rejected = own_methods(self._observers, RequestObserver.rejected)
        self._taken_back = own_methods(self._observers, RequestObserver.taken_back)
        self._sent = own_methods(self._observers, RequestObserver.sent)
        self._first_token = own_methods(self._observers, RequestObserver.first_token)
        self._next_chunk = own_methods(self._observers, RequestObserver.next_chunk)
        self._ended = own_methods(self._observers, RequestObserver.ended)

    def placed(self, placement: Placement, decision_s: float) -> None:
        for observe in self._placed:
            observe(placement, decision_s)

    def waited(self, wait: Wait) -> None:
        for observe in self._waited:
            observe(wait)

    def rejected(self, priority: Priority, refusal: str) -> None:
        for observe in self._rejected:
            observe(priority, refusal)

    def taken_back(self, why: TakenBack) -> None:
        for observe in self._taken_back:
            observe(why)

    def sent(self, attempt: Attempt) -> None:
        for observe in self._sent:
            observe(attempt)

    def first_token(self, attempt: Attempt) -> None:
        for observe in self._first_token:
            observe(attempt)

    def next_chunk(self, attempt: Attempt, gap_s: float) -> None:
        for observe in self._next_chunk:
            observe(attempt, gap_s)

    def ended(self, attempt: Attempt) -> None:
        for observe in self._ended:
            observe(attempt)


def _flat(observers: tuple[RequestObserver, ...]) -> Iterator[RequestObserver]:
    """Yield the observers, and in place of each group of observers its members."""
    for observer in observers:
        if isinstance(observer, RequestObservers):
            yield from observer._observers
        else:
            yield observer
