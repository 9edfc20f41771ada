"""The fingerprints of a prompt: they depend on its tokens and on who may share its blocks."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from msgspec import Struct
from msgspec.structs import replace
from numpy.typing import NDArray

from kvroute.blocks.fingerprint import Fingerprint, MediaSpan, fingerprints, namespaced, root


class Scope(Struct, frozen=True):
    """The part of a request that decides with which other requests it shares cached blocks.

    Requests with equal scopes share all blocks. Requests that differ in the namespace only share
    their first `shared_tokens`.
    """

    # The variant of the model, whose blocks differ from those of all others: the name or key of a
    # LoRA adapter; empty: the model itself.
    variant: str = ""
    namespace: str = ""  # cache salt; empty: all requests without a salt share the blocks
    # Number of tokens at the start, a multiple of the block size, that all namespaces share.
    shared_tokens: int = 0


EVERYBODY = Scope()  # the base model without a cache salt


@dataclass(frozen=True, slots=True)
class Space:
    """The properties of a model that all of its fingerprints depend on."""

    model: str
    revision: str
    block_size: int  # tokens of one fingerprint

    def chain(
        self,
        token_ids: NDArray[np.uint32],
        scope: Scope,
        media: Sequence[MediaSpan] = (),
        *,
        before: Sequence[Fingerprint] = (),
    ) -> list[Fingerprint]:
        """Return the fingerprints of the full blocks of these tokens.

        Args:
            token_ids: the tokens, shape (n,).
            scope: who may share the blocks.
            media: images and other media; their offsets count from the first of `token_ids`.
            before: fingerprints of the blocks before `token_ids`.
        """
        size, parent = self.block_size, self._parent(scope, before)
        # Number of leading `token_ids` that all namespaces share.
        split = scope.shared_tokens - len(before) * size if scope.namespace else 0
        if not 0 < split < len(token_ids):
            return fingerprints(token_ids, block_size=size, parent=parent, media=media)
        shared = fingerprints(token_ids[:split], block_size=size, parent=parent, media=media)
        return shared + fingerprints(
            token_ids[split:],
            block_size=size,
            parent=namespaced(shared[-1], scope.namespace),
            media=[replace(span, offset=span.offset - split) for span in media],
        )

    def _parent(self, scope: Scope, before: Sequence[Fingerprint]) -> Fingerprint:
        """Return the parent of the first block after `before`."""
        if not before:
            return self._root(scope)
        is_first = scope.namespace and len(before) * self.block_size == scope.shared_tokens
        return namespaced(before[-1], scope.namespace) if is_first else before[-1]

    def _root(self, scope: Scope) -> Fingerprint:
        return root(
            model=self.model,
            revision=self.revision,
            block_size=self.block_size,
            variant=scope.variant,
            namespace="" if scope.shared_tokens else scope.namespace,
        )
