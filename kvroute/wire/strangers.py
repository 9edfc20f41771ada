"""The connections of a server whose peers have not yet proven that they may use it."""

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

Connected = TypeVar("Connected", bound=Hashable)


class Strangers(Generic[Connected]):
    """Connections without a proof, at most `most` of them.

    Everybody who reaches the port can open connections and send nothing. So a new connection always
    gets a place: a peer that knows the secret proves it within a round trip, and so only strangers
    stay long enough to lose their place. Connections with a proof take no places.

    Methods may be called in several threads.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._connections = OrderedDict[Connected, None]()  # the oldest first

    def add(self, connection: Connected) -> Connected | None:
        """Add a connection; return the oldest one, to be closed, if there are too many."""
        self._connections[connection] = None
        if len(self._connections) <= self._most:
            return None
        return self._connections.popitem(last=False)[0]

    def discard(self, connection: Connected) -> None:
        """Remove a connection that has ended, or whose peer has sent its proof."""
        self._connections.pop(connection, None)
