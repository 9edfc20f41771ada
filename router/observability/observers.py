"""Forwards what happens to a request to several observers."""

from collections.abc import Callable, Iterator
from typing import Any

from kvroute.features.own_methods import own_methods
from kvroute.router.placement.attempts import RequestObserver

EVENTS: tuple[Callable[..., None], ...] = tuple(
    method for name, method in vars(RequestObserver).items() if not name.startswith("_")
)


class RequestObservers(RequestObserver):
    """Forwards each event to the observers that do not ignore it. Most ignore most events."""

    def __init__(self, *observers: RequestObserver) -> None:
        self._observers = [*_flat(observers)]
        for event in EVENTS:
            setattr(self, event.__name__, _forwarded(own_methods(self._observers, event)))


def _forwarded(methods: list[Callable[..., None]]) -> Callable[..., None]:
    """Return a function that calls all of these methods."""
    if len(methods) == 1:
        return methods[0]

    def call_all(*event: Any) -> None:
        for method in methods:
            method(*event)

    return call_all


def _flat(observers: tuple[RequestObserver, ...]) -> Iterator[RequestObserver]:
    """Yield the observers, and in place of each group of observers its members."""
    for observer in observers:
        if isinstance(observer, RequestObservers):
            yield from observer._observers
        else:
            yield observer
