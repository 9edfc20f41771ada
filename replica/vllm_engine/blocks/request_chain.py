"""The fingerprints of a request's tokens, computed beside vLLM's hashes of them."""

from collections.abc import Sequence

import numpy as np
from vllm.v1.request import Request

from kvroute.blocks.chain import Space
from kvroute.blocks.fingerprint import Feature, Fingerprint
from kvroute.replica.vllm_engine.blocks.cache_salt import scope_of


class RequestChain:
    """It grows as far as the request's cached blocks reach.

    The next input of a streaming session replaces some tokens. vLLM's hash at the chain's end
    proves that those before it are still the same: else the chain begins anew.
    """

    def __init__(self, space: Space) -> None:
        self._space = space
        self._begin()

    def _begin(self) -> None:
        self._fingerprints: list[Fingerprint] = []
        self._hashes = 0  # of vLLM, before the chain's end
        self._last_hash = b""  # of them

    def at(
        self, request: Request, ends: Sequence[int], hash_tokens: int
    ) -> list[Fingerprint | None]:
        """The fingerprint of the tokens before each end; None where none ends.

        hash_tokens: tokens of one of the request's block hashes; each end is a multiple of it.
        """
        if self._hashes and not self._is_of(request):
            self._begin()
        if ends and ends[-1] > self._hashes * hash_tokens:
            self._extend(request, ends[-1])
            self._hashes = ends[-1] // hash_tokens
            self._last_hash = request.block_hashes[self._hashes - 1]
        unit = self._space.block_size
        return [None if end % unit else self._fingerprints[end // unit - 1] for end in ends]

    def _is_of(self, request: Request) -> bool:
        """The tokens before its end are still the request's."""
        hashes: list[bytes] = request.block_hashes
        return len(hashes) >= self._hashes and hashes[self._hashes - 1] == self._last_hash

    def _extend(self, request: Request, end: int) -> None:
        unit = self._space.block_size
        begin = len(self._fingerprints) * unit
        ids = np.array(request.all_token_ids[begin:end], np.int64).astype(np.uint32)
        self._fingerprints += self._space.chain(
            ids, scope_of(request), _features_from(request, begin), before=self._fingerprints
        )


def chain_of(request: Request, space: Space) -> RequestChain:
    """Kept with the request."""
    if not hasattr(request, "kvroute_chain"):
        request.kvroute_chain = RequestChain(space)
    chain: RequestChain = request.kvroute_chain
    return chain


def _features_from(request: Request, begin: int) -> list[Feature]:
    """Counted from that token; none if all have ended there."""
    given = request.mm_features
    if not given or given[-1].mm_position.offset + given[-1].mm_position.length <= begin:
        return []
    return [
        Feature(each.identifier, each.mm_position.offset - begin, each.mm_position.length)
        for each in given
    ]
