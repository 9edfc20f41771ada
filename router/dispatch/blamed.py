"""The list of blamed requests: those that crashed a replica or made it hang.

Routers refuse these requests for some minutes.
Client libraries retry failed requests, and each retry would stop another replica. A request is
identified by its content: the tokens of its prompt, its path and its body. Routers publish their
additions to each other.
"""

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvroute.contract.generation import GenerateRequest
from kvroute.router.api.errors import ApiError

REFUSED_S = 180.0  # seconds for which a request is refused; longer than clients retry
MAX_REQUESTS = 1024  # requests on the list; a further request replaces the oldest one
DIGEST_BYTES = 16  # length of the hash that identifies a request


@dataclass(frozen=True, slots=True)
class _Blame:
    since_s: float  # time when the request was added
    reason: str  # clause for error messages; see `PoisonList.add`


class PoisonList:
    """One router's list of blamed requests for one model.

    Args:
        publish: called with the digest of each request that this router adds.
        clock: returns the time in seconds.
    """

    def __init__(
        self,
        publish: Callable[[bytes], object] = lambda digest: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.added = 0  # requests that this router has added since its start
        self._publish = publish
        self._clock = clock
        self._entries: dict[bytes, _Blame] = {}  # digest -> entry, the oldest first

    def add(self, request: GenerateRequest, reason: str) -> None:
        """Refuse this request in all routers from now on.

        Args:
            reason: a clause that says what the request did, such as "it stopped replica r1".
        """
        self.added += 1
        digest = _digest(request)
        self._note(digest, reason)
        self._publish(digest)

    def receive(self, digest: bytes) -> None:
        """Add a request that another router has published."""
        self._note(digest, "it stopped a replica, as another router has reported")

    def check(self, request: GenerateRequest) -> None:
        """Check that a request is not on the list.

        Raises:
            ApiError: the request is on the list.
        """
        if not self._current():  # the usual case; avoids the hash, which takes 1 ms for 1 MB
            return
        if blame := self._entries.get(_digest(request)):
            raise ApiError(
                400,
                f"{blame.reason}; so it is refused for {REFUSED_S:g} s. Do not send it again "
                "unchanged: use a smaller schema, grammar, tools or prompt",
                code="request_blamed",
            )

    def as_json(self) -> list[dict[str, Any]]:
        """Return the age and the reason of each request on the list."""
        now_s = self._clock()
        return [{"age_s": now_s - entry.since_s, "why": entry.reason} for entry in self._current()]

    def _current(self) -> list[_Blame]:
        """Remove entries that are too old, and return the others."""
        oldest_s = self._clock() - REFUSED_S
        while self._entries and next(iter(self._entries.values())).since_s < oldest_s:
            del self._entries[next(iter(self._entries))]
        return [*self._entries.values()]

    def _note(self, digest: bytes, reason: str) -> None:
        self._entries.pop(digest, None)
        self._entries[digest] = _Blame(self._clock(), reason)
        if len(self._entries) > MAX_REQUESTS:
            del self._entries[next(iter(self._entries))]


def _digest(request: GenerateRequest) -> bytes:
    """Return a hash of the request's content, which is equal in every router and for a retry."""
    digest = hashlib.blake2b(request.prompt_ids.tobytes(), digest_size=DIGEST_BYTES)
    if request.call:
        digest.update(request.call.path.encode())
        digest.update(request.call.body)
        if request.call.upload:
            digest.update(request.call.upload.digest)
    return digest.digest()
