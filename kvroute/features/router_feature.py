"""What a feature does in the router of one model. Each method has an empty default."""

from collections.abc import Coroutine, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from kvroute.features.expanded import Expanded
from kvroute.features.figure import Figure
from kvroute.features.placing_feature import PlacingFeature

if TYPE_CHECKING:
    from fastapi import Request, Response
    from prometheus_client import CollectorRegistry

    from kvroute.contract.generation import TokenIds
    from kvroute.features.opening import Opening
    from kvroute.process.exposition import Readings
    from kvroute.router.api.calls import Call
    from kvroute.router.dispatch.generation import Generation
    from kvroute.router.placement.attempts import RequestObserver
    from kvroute.router.serving.assembly import Parts
    from kvroute.router.serving.rendering import RenderedCall
    from kvroute.router.sessions.breaks import Break


class RouterFeature(PlacingFeature):
    """One feature of one model in one router. It may import the core, and no other feature."""

    # Paths of the routes that it extends: `answer` and `expand` get their calls. No other feature
    # extends the same routes.
    extends: Sequence[str] = ()
    observer: "RequestObserver | None" = None  # gets the events of this router's requests

    # Its life, in this order.

    def attach(self, parts: "Parts") -> None:
        """Keep the parts of the router that it uses. All of them are built now."""

    def metrics(self, registry: "CollectorRegistry", readings: "Readings") -> None:
        """Export its metrics; called once, unless metrics are off."""

    def tasks(self) -> Mapping[str, Coroutine[Any, Any, None]]:
        """Return its background tasks by name. None of them ends by itself."""
        return {}

    # Variants of the model, and the requests of clients to this router.

    def variant(self, name: str, tenant: str) -> str | None:
        """Return the variant that a tenant's clients request by a name; None: it has none.

        Cached blocks depend on the variant (blocks/variants.py).
        """
        return None

    async def look_for(self, name: str) -> None:
        """Look for a variant that it does not know by this name, since another router may."""

    def cards(self, tenant: str) -> Sequence[Mapping[str, Any]]:
        """Return what clients of a tenant read about its variants, as JSON (GET /v1/models)."""
        return ()

    def promises(self, call: "Call") -> bool:
        """Return whether the client of a call promises that its conversation will continue."""
        return False

    def with_data(self, call: "Call") -> AbstractContextManager["Call"]:
        """Return a context that lasts until a call has ended, and that gives the call to answer.

        That call can have data for this feature in the replicas (`features`).
        """
        return nullcontext(call)

    async def answer(self, call: "Call", request: "Request") -> "Response | Call | None":
        """Return the response to a call that it answers itself, or None: replicas answer it.

        The result can also be another call, which replicas answer instead.

        Raises:
            ApiError: the call cannot be answered.
        """
        return None

    async def expand(self, call: "Call") -> Expanded:
        """Return a call with what the cluster has stored for it.

        Raises:
            ApiError: what the call names is not stored, or makes the prompt too long.
        """
        return Expanded(call)

    async def opening(self, call: "Call") -> "Opening | None":
        """Return the beginning that it adds to the prompts of a call; None: it adds none.

        The first feature that adds one is the only one.

        Raises:
            ApiError: the call names a beginning that does not exist.
        """
        return None

    def change(
        self, expanded: "Expanded", rendered: "RenderedCall", variant: str, *, is_sent: bool
    ) -> "Break | None":
        """Return where a prompt differs from the earlier prompt of its chat.

        The result is None if it does not differ, or if the call is not a chat.

        Args:
            variant: the variant of the model; see Scope.
            is_sent: whether the prompt will be sent. Later prompts are then compared with it.
        """
        return None

    def started(self, generation: "Generation") -> None:
        """Record that a prompt has its first token."""

    def shared_tokens(self, token_ids: "TokenIds") -> int:
        """Return how many leading tokens of a prompt all namespaces share in the caches."""
        return 0

    # What operators see.

    def state(self) -> Mapping[str, Any] | None:
        """Return its state as JSON, for GET /v1/cluster and the doctor."""
        return None

    async def figures(self) -> Sequence[Figure]:
        """Return figures for those who watch the router; none if it does nothing now."""
        return ()
