"""Questions that every replica can answer, such as how a body is rendered."""

import logging
import random
from collections.abc import Callable, Collection

from kvroute.contract.ranks import replica_of, replicas_of
from kvroute.router.api.errors import ApiError
from kvroute.router.connections.links import LateError, Links, UnansweredError
from kvroute.router.dispatch.admission import Gate
from kvroute.router.dispatch.losses import Losses, last_words

log = logging.getLogger("kvroute.dispatch")

TRIES = 8  # replicas that get a question, one after the other
ANSWER_S = 60.0  # seconds for a replica to answer a call
MANY = 4  # answers; a replica owes them one after the other where it processes images


class Questions:
    """Sends each question to a replica that owes few answers."""

    def __init__(self, links: Links, gate: Gate) -> None:
        self._links = links
        self._gate = gate

    async def ask(
        self,
        method: str,
        body: bytes,
        *,
        within_s: float = ANSWER_S,
        prefer: Callable[[Collection[str]], str] | None = None,
    ) -> bytes:
        """Return the answer of one of the replicas that owe the fewest answers.

        Args:
            prefer: the replica that is asked, of these, unless it owes MANY more than others.

        Raises:
            ApiError: none answers, or engines die of the question.
        """
        gone, losses = set[str](), Losses()
        for _ in range(TRIES):
            running = await self._gate.running(gone)
            replica_id = self._chosen(running, prefer)
            try:
                return await self._links.call(replica_id, method, body, within_s=within_s)
            except LateError as error:  # the next one would only have the same to do
                busy = f"replica {replica_id} is too busy: {error}"
                raise ApiError(503, busy, type="server_error") from error
            except UnansweredError as error:
                log.info("replica %s did not answer %s: %s", replica_id, method, error)
                gone.add(replica_of(replica_id))
                if words := last_words(error.__cause__):
                    losses.add(
                        replica_id, died=True, is_gone=True, held_s=0.0, tokens=0, words=words
                    )
                    losses.check()
                if len(gone) == len(replicas_of(self._gate.liveness.trusted())):
                    break
        raise ApiError(503, "no replica answers; try again", type="server_error")

    def _chosen(
        self, running: Collection[str], prefer: Callable[[Collection[str]], str] | None
    ) -> str:
        pending_calls = {id_: self._links.pending_calls(id_) for id_ in running}
        least = min(running, key=lambda id_: (pending_calls[id_], random.random()))
        preferred = prefer(running) if prefer else least
        return preferred if pending_calls[preferred] <= pending_calls[least] + MANY else least
