"""The fingerprints of a vLLM request's blocks.

They form a chain: each fingerprint is a hash of a block and of all blocks before it.
"""

from collections.abc import Sequence

import numpy as np
from vllm.v1.request import Request

from kvroute.blocks.chain import Space
from kvroute.blocks.fingerprint import Fingerprint, MediaSpan
from kvroute.replica.vllm_engine.blocks.cache_salt import scope_of


class RequestChain:
    """The chain of a request's fingerprints. It grows as the request's blocks are cached.

    In a streaming session, the next input can replace some of the request's tokens. To notice this,
    the chain remembers vLLM's own hash of its last block. If that hash has changed, the chain is
    computed again from the start.
    """

    def __init__(self, space: Space) -> None:
        self._space = space
        self._reset()

    def _reset(self) -> None:
        self._fingerprints: list[Fingerprint] = []
        self._hashes = 0  # number of vLLM's block hashes that cover the same tokens as the chain
        self._last_hash = b""  # the last one of these hashes

    def fingerprints_at(
        self, request: Request, ends: Sequence[int], hash_tokens: int
    ) -> list[Fingerprint | None]:
        """Return the fingerprints at some positions in the request's tokens.

        Args:
            request: The request.
            ends: Positions in ascending order, as numbers of tokens before them. Each is a multiple
                of `hash_tokens`.
            hash_tokens: The number of tokens that one of vLLM's block hashes covers.

        Returns:
            For each position, the fingerprint of the tokens before it. None: the position is not a
            multiple of the fingerprints' block size.
        """
        if self._hashes and not self._is_current(request):
            self._reset()
        if ends and ends[-1] > self._hashes * hash_tokens:
            self._extend(request, ends[-1])
            self._hashes = ends[-1] // hash_tokens
            self._last_hash = request.block_hashes[self._hashes - 1]
        unit = self._space.block_size
        return [None if end % unit else self._fingerprints[end // unit - 1] for end in ends]

    def _is_current(self, request: Request) -> bool:
        """Return whether the chain still belongs to the request's tokens."""
        hashes: list[bytes] = request.block_hashes
        return len(hashes) >= self._hashes and hashes[self._hashes - 1] == self._last_hash

    def _extend(self, request: Request, end: int) -> None:
        unit = self._space.block_size
        start = len(self._fingerprints) * unit
        ids = np.array(request.all_token_ids[start:end], np.int64).astype(np.uint32)
        self._fingerprints += self._space.chain(
            ids, scope_of(request), _media_from(request, start), before=self._fingerprints
        )


def chain_of(request: Request, space: Space) -> RequestChain:
    """Return the request's chain, which is stored as an attribute of the request."""
    if not hasattr(request, "kvroute_chain"):
        request.kvroute_chain = RequestChain(space)
    chain: RequestChain = request.kvroute_chain
    return chain


def _media_from(request: Request, start: int) -> list[MediaSpan]:
    """Return the request's multimodal features, with offsets relative to token `start`.

    Returns an empty list if all media end before `start`.
    """
    media = request.mm_features
    if not media or media[-1].mm_position.offset + media[-1].mm_position.length <= start:
        return []
    return [
        MediaSpan(span.identifier, span.mm_position.offset - start, span.mm_position.length)
        for span in media
    ]
