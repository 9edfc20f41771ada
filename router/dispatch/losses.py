"""The replicas that one request has lost, and whether it may be the cause."""

from kvroute.contract.generation import EngineDeadError
from kvroute.contract.ranks import replica_of
from kvroute.router.api.errors import ApiError

CAUSED = 2  # replicas in a row that died soon after they got the request: it may be the cause
LOSSES = 5  # replicas that a request may lose otherwise
SOON_TOKENS = 16  # a replica that generated more of the response has computed the request
DEAD_BEFORE_S = 0.05  # one that is gone sooner, without a token or a word, was dead before


class Losses:
    """Of one request. A hung replica is lost, but what stopped it is rarely a request."""

    def __init__(self) -> None:
        self.replica_ids: list[str] = []
        self.gone: set[str] = set()  # replicas that get it no more; others may be connected again
        self._died_soon: list[
            str
        ] = []  # replicas in a row that died soon after they got the request
        self._words = ""  # the reason that the last of them gave
        self._stopped = 0  # replicas that hung while they prepared this request and others

    def add(
        self,
        replica_id: str,
        *,
        died: bool,
        is_gone: bool,
        held_s: float,
        tokens: int,
        words: str = "",
    ) -> None:
        """Record a loss.

        Args:
            died: the replica's process or engine ended; False: it hung.
            is_gone: the replica is gone, not only the connection to it.
            held_s: seconds for which it had the request.
            tokens: number of tokens that it generated.
            words: why its engine died under the request, as the replica reported.
        """
        self.replica_ids.append(replica_id)
        if is_gone:
            self.gone.add(replica_of(replica_id))
        if tokens > SOON_TOKENS:
            self._died_soon.clear()
        elif died and (words or tokens or held_s >= DEAD_BEFORE_S):
            self._died_soon.append(replica_id)
            self._words = words

    def has_stopped(self, among: int) -> bool:
        """Return whether the request is the cause of a hang.

        Either the replica prepared no other request, or the hang is the second one.

        Args:
            among: requests that the replica prepared; 0: this was none of them.
        """
        self._stopped += among > 0
        return among == 1 or (among > 1 and self._stopped > 1)

    @property
    def is_cause(self) -> bool:
        """Return whether so many replicas have died of the request that it may be the cause."""
        return len(self._died_soon) >= CAUSED

    def check(self) -> None:
        """Refuse the request if no other replica may get it.

        Raises:
            ApiError: no other replica may get it.
        """
        if self.is_cause:
            raise ApiError(
                502,
                f"replicas {' and '.join(self._died_soon)} died soon after they got this request, "
                "which may be the cause; it is sent to no other, and should not be sent again"
                + (f". The last words were: {self._words}" if self._words else ""),
                type="server_error",
                code="replicas_died",
            )
        if len(self.replica_ids) >= LOSSES:
            raise lost(self.replica_ids[-1], f"and {LOSSES - 1} others before it")


def last_words(error: BaseException | None) -> str:
    """Return why the engine died, if it did under the request; else an empty string."""
    return str(error) if isinstance(error, EngineDeadError) else ""


def lost(replica_id: str, more: str) -> ApiError:
    return ApiError(
        502,
        f"replica {replica_id} was lost while it answered, {more}; try again",
        type="server_error",
    )
