"""Calls that any replica can answer, such as the rendering of a body to token ids."""

import logging
import random
from collections.abc import Callable, Collection

from kvroute.contract.ranks import replica_of, replicas_of
from kvroute.router.api.errors import ApiError
from kvroute.router.connections.links import LateError, Links, UnansweredError
from kvroute.router.dispatch.admission import AdmissionControl
from kvroute.router.dispatch.losses import Losses, engine_failure

log = logging.getLogger("kvroute.dispatch")

TRIES = 8  # replicas that get a call, one after the other, until one answers
TIMEOUT_S = 60.0  # seconds for a replica to answer a call
# The preferred replica may have this many more pending calls than the least busy one. With a
# smaller number, it would often be passed over, since images are processed one after the other.
MAX_EXTRA_CALLS = 4


class Questions:
    """Sends each call to a replica with few pending calls."""

    def __init__(self, links: Links, control: AdmissionControl) -> None:
        self._links = links
        self._control = control

    async def ask(
        self,
        method: str,
        body: bytes,
        *,
        within_s: float = TIMEOUT_S,
        prefer: Callable[[Collection[str]], str] | None = None,
    ) -> bytes:
        """Call a method of one of the replicas with the fewest pending calls; return its answer.

        Args:
            method: name of the method.
            body: the method's argument.
            within_s: seconds for a replica to answer.
            prefer: returns the preferred one of the given replicas. It gets the call if it has at
                most MAX_EXTRA_CALLS more pending calls than the least busy replica.

        Raises:
            ApiError: no replica answers, or the call kills the engines that get it.
        """
        excluded_ids, losses = set[str](), Losses()
        for _ in range(TRIES):
            running = await self._control.running(excluded_ids)
            replica_id = self._chosen(running, prefer)
            try:
                return await self._links.call(replica_id, method, body, within_s=within_s)
            except LateError as error:  # another replica would take as long
                busy = f"replica {replica_id} is too busy: {error}"
                raise ApiError(503, busy) from error
            except UnansweredError as error:
                log.info("replica %s did not answer %s: %s", replica_id, method, error)
                excluded_ids.add(replica_of(replica_id))
                if words := engine_failure(error.__cause__):
                    losses.add(
                        replica_id,
                        died=True,
                        is_excluded=True,
                        was_taken=True,
                        tokens=0,
                        words=words,
                    )
                    losses.check()
                if len(excluded_ids) == len(replicas_of(self._control.liveness.trusted())):
                    break
        raise ApiError(503, "no replica has answered; try again")

    def _chosen(
        self, running: Collection[str], prefer: Callable[[Collection[str]], str] | None
    ) -> str:
        pending = {id_: self._links.pending_calls(id_) for id_ in running}
        least_busy = min(running, key=lambda id_: (pending[id_], random.random()))
        preferred = prefer(running) if prefer else least_busy
        is_close = pending[preferred] <= pending[least_busy] + MAX_EXTRA_CALLS
        return preferred if is_close else least_busy
