"""Forwards what happens to a request to several observers."""

from collections.abc import Callable
from itertools import chain

from kvroute.contract.priority import Priority
from kvroute.router.admission.waits import Refusal, TakenBack, Wait
from kvroute.router.placement.attempts import Attempt, Placement, RequestObserver


class RequestObservers(RequestObserver):
    """Forwards each event to several observers."""

    def __init__(self, *observers: RequestObserver) -> None:
        self._observers = observers
        self._chunk_observers = [*chain.from_iterable(map(_chunk_observers, observers))]

    def placed(self, placement: Placement, decision_s: float) -> None:
        for observer in self._observers:
            observer.placed(placement, decision_s)

    def waited(self, wait: Wait) -> None:
        for observer in self._observers:
            observer.waited(wait)

    def seated(self, waited_s: float) -> None:
        for observer in self._observers:
            observer.seated(waited_s)

    def rejected(self, priority: Priority, refusal: Refusal) -> None:
        for observer in self._observers:
            observer.rejected(priority, refusal)

    def taken_back(self, why: TakenBack) -> None:
        for observer in self._observers:
            observer.taken_back(why)

    def sent(self, attempt: Attempt) -> None:
        for observer in self._observers:
            observer.sent(attempt)

    def first_token(self, attempt: Attempt) -> None:
        for observer in self._observers:
            observer.first_token(attempt)

    def next_chunk(self, attempt: Attempt, gap_s: float) -> None:
        for observe in self._chunk_observers:
            observe(attempt, gap_s)

    def ended(self, attempt: Attempt) -> None:
        for observer in self._observers:
            observer.ended(attempt)


def _chunk_observers(observer: RequestObserver) -> list[Callable[[Attempt, float], None]]:
    """Return the observer's methods to call for each chunk. Most observers ignore chunks."""
    if isinstance(observer, RequestObservers):
        return observer._chunk_observers
    is_own = type(observer).next_chunk is not RequestObserver.next_chunk
    return [observer.next_chunk] if is_own else []
