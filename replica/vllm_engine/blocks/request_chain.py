"""The fingerprints of a request's tokens, in addition to vLLM's hashes of the same tokens."""

from collections.abc import Sequence

import numpy as np
from vllm.v1.request import Request

from kvroute.blocks.chain import Space
from kvroute.blocks.fingerprint import Feature, Fingerprint
from kvroute.replica.vllm_engine.blocks.cache_salt import scope_of


class RequestChain:
    """The chain of a request's fingerprints; it grows as the request's blocks are cached.

    The next input of a streaming session replaces some of the request's tokens. If vLLM's hash at
    the chain's end has changed, the chain is computed again from the start.
    """

    def __init__(self, space: Space) -> None:
        self._space = space
        self._begin()

    def _begin(self) -> None:
        self._fingerprints: list[Fingerprint] = []
        self._hashes = 0  # number of vLLM's block hashes up to the chain's end
        self._last_hash = b""  # the last of these hashes

    def at(
        self, request: Request, ends: Sequence[int], hash_tokens: int
    ) -> list[Fingerprint | None]:
        """Return the fingerprint of the tokens before each end.

        Args:
            request: The request.
            ends: Numbers of tokens, in ascending order; each is a multiple of `hash_tokens`.
            hash_tokens: The number of tokens of one of the request's block hashes.

        Returns:
            For each end its fingerprint, or None if the end is not a multiple of the block size.
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
        """Return whether the tokens before the chain's end are still the request's tokens."""
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
    """Return the request's chain; it is an attribute of the request."""
    if not hasattr(request, "kvroute_chain"):
        request.kvroute_chain = RequestChain(space)
    chain: RequestChain = request.kvroute_chain
    return chain


def _features_from(request: Request, begin: int) -> list[Feature]:
    """Return the features with offsets relative to token `begin`; none if all end before it."""
    features = request.mm_features
    if not features or features[-1].mm_position.offset + features[-1].mm_position.length <= begin:
        return []
    return [
        Feature(feature.identifier, feature.mm_position.offset - begin, feature.mm_position.length)
        for feature in features
    ]
