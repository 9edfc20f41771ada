"""A call with what features add to it, such as what the cluster has stored for it."""

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from msgspec import Struct

if TYPE_CHECKING:
    from fastapi import Response

    from kvroute.features.opening import Opening
    from kvroute.router.api.calls import Call


class Expanded(Struct, frozen=True):
    """A call as replicas get it, and what happens to the response."""

    call: "Call"
    has_more_messages: bool = False  # whether the prompt has messages that `Call.body` lacks
    # Returns the response that the client gets instead of that of the replicas.
    finish: "Callable[[Response], Awaitable[Response]] | None" = None
    opening: "Opening | None" = None  # the beginning that a feature adds to the prompts
