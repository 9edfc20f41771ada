"""A hook that nobody overrides is not called."""

from kvroute.features.own_methods import own_methods
from kvroute.router.placement.attempts import Attempt, RequestObserver


class Ends(RequestObserver):
    def ended(self, attempt: Attempt) -> None:
        """Do something."""


class LoudEnds(Ends):
    """Inherits a method that is not the empty default."""


def test_only_objects_that_override_a_method_are_called() -> None:
    first, second = Ends(), LoudEnds()
    observers = [RequestObserver(), first, second]
    assert own_methods(observers, RequestObserver.ended) == [first.ended, second.ended]
    assert own_methods(observers, RequestObserver.sent) == []
