"""What a feature adds to the placement and admission of prompts. Each hook has an empty default.

The hooks only compute: they use no clock and no socket, and take microseconds. So a replay calls
them, too. router_feature.py adds what a feature does besides in a router.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvroute.contract.unreadable import DECODE_ERRORS
from kvroute.features.line import Line
from kvroute.features.own_methods import overriding, own_methods

if TYPE_CHECKING:
    from kvroute.contract.generation import Chunk, GenerateRequest
    from kvroute.contract.keep import SessionTurn
    from kvroute.router.placement.attempts import Attempt, RequestContext
    from kvroute.router.placement.fleet import Fleet
    from kvroute.router.placement.policy import Candidate, PromptFacts


class PlacingFeature:
    """One feature of one model, where prompts are placed and admitted."""

    name = ""  # the name of its folder, which is the key of its data in messages
    line: Line[Any, Any] | None = None  # where requests wait for it; None: none does
    # Whether it also gets what routers of other Ray clusters share, which have other replicas.
    hears_all = False
    # The router's publisher replaces this. A feature calls it when `share` has something new.
    on_change: Callable[[], object] = staticmethod(lambda: None)

    # The replicas.

    def updated(self, fleet: "Fleet") -> None:
        """Read the new records of the replicas."""

    def usable(self, variant: str, replica_ids: Sequence[str]) -> Sequence[str]:
        """Return those of the replicas that can run a variant of the model.

        If none can, the request may go to all of them.

        Args:
            variant: the variant; never empty.
        """
        return replica_ids

    def weigh(
        self, prompt: "PromptFacts", candidates: "Sequence[Candidate]", now_s: float
    ) -> "Sequence[Candidate]":
        """Return the candidates of a prompt, with the terms of this feature (policy.py: Term).

        It is called once for each prompt, unless the routing policy ignores costs.
        """
        return candidates

    # The requests of this router.

    def recognised(
        self, context: "RequestContext", turn: "SessionTurn", earlier: "SessionTurn | None"
    ) -> "RequestContext":
        """Return the context of a prompt that was placed for the first time.

        Args:
            turn: the prompt's turn in its session, which the context already has.
            earlier: the turn that it continues; None: it is the first one.
        """
        return context

    def sending(self, request: "GenerateRequest", attempt: "Attempt") -> "GenerateRequest":
        """Record that a request is sent to a replica, and return it as the replica gets it."""
        return request

    def answering(self, attempt: "Attempt", chunk: "Chunk", now_s: float) -> None:
        """Record a chunk from a replica whose cost has terms of features."""

    # The requests of all routers.

    def attempt_began(self, attempt: "Attempt") -> None:
        """Record that a router has sent a request to a replica."""

    def attempt_ended(self, attempt: "Attempt") -> None:
        """Record the end of an attempt that `attempt_began` got."""

    def turn_began(self, turn: "SessionTurn", earlier: "SessionTurn | None") -> None:
        """Record that a router has sent a new turn of a conversation.

        Args:
            earlier: the turn that it continues; None: it is the first one.
        """

    def session_ended(self, session: int, last: "SessionTurn | None") -> None:
        """Record that a client has declared the end of a session.

        Args:
            last: the turn that was not known to be the session's last one; None: there is none.
        """

    # The other routers.

    def share(self, now_s: float) -> bytes | None:
        """Return what other routers should know now; None: nothing."""
        return None

    def receive(self, router: str, data: bytes | None, now_s: float) -> None:
        """Read what another router has shared in its latest message; None: nothing.

        Raises:
            DECODE_ERRORS: the data cannot be read.
        """

    def connected(self, is_connected: bool, now_s: float) -> None:
        """Learn whether messages arrive from the other routers; called about once per second."""

    def forget(self, router: str) -> None:
        """Forget a router that has ended or is silent."""


class PlacingFeatures:
    """The features of one model, in the order of kvroute/features/__init__.py.

    Each list has the methods of those features that override the hook.

    Args:
        on_unreadable: called with the name of a feature that cannot read what another router
            shares, and the error.
    """

    def __init__(
        self,
        features: Iterable[PlacingFeature] = (),
        on_unreadable: Callable[[str, Exception], object] = lambda name, error: None,
    ) -> None:
        features = tuple(features)
        self._on_unreadable = on_unreadable
        self.lines = [each.line for each in features if each.line is not None]
        self.updated = own_methods(features, PlacingFeature.updated)
        self.usable = own_methods(features, PlacingFeature.usable)
        self.weigh = own_methods(features, PlacingFeature.weigh)
        self.recognised = own_methods(features, PlacingFeature.recognised)
        self._sending = own_methods(features, PlacingFeature.sending)
        self.answering = own_methods(features, PlacingFeature.answering)
        self.attempt_began = own_methods(features, PlacingFeature.attempt_began)
        self.attempt_ended = own_methods(features, PlacingFeature.attempt_ended)
        self.turn_began = own_methods(features, PlacingFeature.turn_began)
        self.session_ended = own_methods(features, PlacingFeature.session_ended)
        self.connected = own_methods(features, PlacingFeature.connected)
        self.sharing = overriding(features, PlacingFeature.share)

    def sending(self, request: "GenerateRequest", attempt: "Attempt") -> "GenerateRequest":
        """Record that a request is sent to a replica, and return it as the replica gets it."""
        for sending in self._sending:
            request = sending(request, attempt)
        return request

    def share(self, now_s: float) -> dict[str, bytes]:
        """Return what other routers should know now, by the name of the feature."""
        shared = {each.name: each.share(now_s) for each in self.sharing}
        return {name: data for name, data in shared.items() if data is not None}

    def receive(
        self, router: str, data: Mapping[str, bytes], now_s: float, *, is_own: bool = True
    ) -> None:
        """Give each feature what another router shares. What no feature knows is ignored.

        Args:
            data: what the other router shares, by the name of the feature.
            is_own: whether it is a router of the same Ray cluster, with the same replicas.
        """
        for feature in self.sharing:
            if not (is_own or feature.hears_all):
                continue
            try:
                feature.receive(router, data.get(feature.name), now_s)
            except DECODE_ERRORS as error:
                self._on_unreadable(feature.name, error)

    def forget(self, router: str) -> None:
        """Forget a router that has ended."""
        for feature in self.sharing:
            feature.forget(router)


NO_FEATURES = PlacingFeatures()
