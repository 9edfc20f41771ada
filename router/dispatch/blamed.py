"""Requests that stopped a replica, which no replica gets for some minutes.

A client's library sends a failed request again, and each time it would stop one replica more. They
are known by their content: the prompt's tokens and the body. All routers share the list.
"""

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvroute.contract.generation import GenerateRequest
from kvroute.router.api.errors import ApiError

KEPT_S = 180.0  # seconds for which a request is refused; clients' retries end sooner
MOST = 1024  # requests that are known; further ones replace the oldest
DIGEST_BYTES = 16
CODE = "request_blamed"


@dataclass(frozen=True, slots=True)
class _Blame:
    at_s: float
    why: str


class PoisonList:
    """The list of one model in one router.

    Args:
        publish: called with the digest of each request that this router adds.
    """

    def __init__(
        self,
        publish: Callable[[bytes], object] = lambda digest: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.added = 0  # requests that this router has added since its start
        self._publish = publish
        self._clock = clock
        self._found: dict[bytes, _Blame] = {}  # digest -> entry, the oldest first

    def add(self, request: GenerateRequest, why: str) -> None:
        """Refuse this request everywhere from now on. why: what it did, as a clause."""
        self.added += 1
        digest = _digest(request)
        self._note(digest, why)
        self._publish(digest)

    def receive(self, digest: bytes) -> None:
        """Add a request of another router."""
        self._note(digest, "it stopped a replica, as another router has seen")

    def check(self, request: GenerateRequest) -> None:
        """Refuse a request that is on the list.

        Raises:
            ApiError: it is.
        """
        if not self._current():  # nearly always; else a body of 1 MB takes 1 ms
            return
        if blame := self._found.get(_digest(request)):
            raise ApiError(
                400,
                f"{blame.why}; so no replica gets it for {KEPT_S:g} s. Do not send it again "
                "unchanged: use a smaller schema, grammar, tools or prompt",
                code=CODE,
            )

    def as_json(self) -> list[dict[str, Any]]:
        """Age and reason of each request on the list."""
        now_s = self._clock()
        return [{"age_s": now_s - each.at_s, "why": each.why} for each in self._current()]

    def _current(self) -> list[_Blame]:
        oldest_s = self._clock() - KEPT_S
        while self._found and next(iter(self._found.values())).at_s < oldest_s:
            del self._found[next(iter(self._found))]
        return [*self._found.values()]

    def _note(self, digest: bytes, why: str) -> None:
        self._found.pop(digest, None)
        self._found[digest] = _Blame(self._clock(), why)
        if len(self._found) > MOST:
            del self._found[next(iter(self._found))]


def _digest(request: GenerateRequest) -> bytes:
    """Return a name for the request's content, the same for each attempt and each router."""
    digest = hashlib.blake2b(request.prompt_ids.tobytes(), digest_size=DIGEST_BYTES)
    if request.call:
        digest.update(request.call.path.encode())
        digest.update(request.call.body)
    return digest.digest()
