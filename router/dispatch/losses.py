"""The replicas that were lost while they ran one request, and whether the request is the cause."""

from kvroute.contract.generation import EngineDeadError
from kvroute.contract.ranks import replica_of
from kvroute.router.api.errors import ApiError

# If this many replicas in a row died soon after they got the request, the request counts as the
# cause, and no other replica gets it.
CAUSED = 2
LOSSES = 5  # a request fails when it has lost this many replicas, whatever the cause
# A replica that sent more output tokens than this did not die soon after it got the request: it had
# computed the prompt without a fault.
SOON_TOKENS = 16


class Losses:
    """The replicas that one request has lost.

    Replicas that hang are counted separately from those that die: a request is seldom the cause of
    a hang.
    """

    def __init__(self) -> None:
        self.replica_ids: list[str] = []
        # Replicas that may not get the request again. Others have only lost their connection.
        self.excluded_ids: set[str] = set()
        # The latest replicas in a row that died soon after they got the request.
        self._died_soon: list[str] = []
        self._words = ""  # why the latest of these engines died, as its replica reported
        self._stopped = 0  # replicas that hung while they prepared this request

    def add(
        self,
        replica_id: str,
        *,
        died: bool,
        is_excluded: bool,
        was_taken: bool,
        tokens: int,
        words: str = "",
    ) -> None:
        """Record a loss.

        Args:
            died: the replica's process or engine ended; False: it hung.
            is_excluded: whether the replica may not get the request again. False if only the
                connection to it may be lost.
            was_taken: whether the replica has begun with the request. Otherwise it may have been
                dead before it got the request.
            tokens: number of tokens that the replica generated.
            words: why the engine died while it ran the request, as the replica reported; empty if
                the replica reported nothing.
        """
        self.replica_ids.append(replica_id)
        if is_excluded:
            self.excluded_ids.add(replica_of(replica_id))
        if tokens > SOON_TOKENS:
            self._died_soon.clear()
        elif died and (words or was_taken):
            self._died_soon.append(replica_id)
            self._words = words

    def has_stopped(self, prepared: int) -> bool:
        """Record a hang, and return whether the request is the cause.

        It is the cause if the replica prepared no other request, or if this is the second replica
        that hung while it prepared the request.

        Args:
            prepared: number of requests that the replica was preparing when it hung; 0: this
                request was not one of them.
        """
        self._stopped += prepared > 0
        return prepared == 1 or (prepared > 1 and self._stopped > 1)

    @property
    def is_cause(self) -> bool:
        """Return whether CAUSED replicas in a row died soon after they got the request."""
        return len(self._died_soon) >= CAUSED

    def check(self) -> None:
        """Check that the request may be sent to another replica.

        Raises:
            ApiError: the request has lost too many replicas.
        """
        if self.is_cause:
            raise ApiError(
                502,
                f"replicas {' and '.join(self._died_soon)} died soon after they got this request, "
                "which may be the cause. It is not sent to another replica; do not send it again"
                + (f". The last replica reported: {self._words}" if self._words else ""),
                code="replicas_died",
            )
        if len(self.replica_ids) >= LOSSES:
            raise lost(self.replica_ids[-1], f"and {LOSSES - 1} other replicas before it")


def engine_failure(error: BaseException | None) -> str:
    """Return why an engine died while it ran the request; empty if the error is another one."""
    return str(error) if isinstance(error, EngineDeadError) else ""


def lost(replica_id: str, more: str) -> ApiError:
    """Return the error for a request that cannot continue after its replica was lost.

    Args:
        more: continues the message after "replica r1 was lost while it answered,".
    """
    return ApiError(
        502,
        f"replica {replica_id} was lost while it answered, {more}; try again",
    )
