"""A prompt's fingerprints, by its tokens and by who may share its cached blocks."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from msgspec import Struct
from msgspec.structs import replace
from numpy.typing import NDArray

from kvroute.blocks.fingerprint import Feature, Fingerprint, fingerprints, namespaced, root


class Scope(Struct, frozen=True):
    """Requests of equal scopes share cached blocks."""

    lora: str = ""  # name of the LoRA adapter; empty: the model itself
    namespace: str = ""  # cache salt; empty: everybody's
    shared_tokens: int = 0  # from the prompt's start, in whole blocks: everybody's all the same


EVERYBODY = Scope()


@dataclass(frozen=True, slots=True)
class Space:
    """What is the same for all fingerprints of a model."""

    model: str
    revision: str
    block_size: int  # tokens of one fingerprint

    def chain(
        self,
        token_ids: NDArray[np.uint32],
        scope: Scope,
        features: Sequence[Feature] = (),
        *,
        before: Sequence[Fingerprint] = (),
    ) -> list[Fingerprint]:
        """The fingerprints of the full blocks of these tokens.

        before: of the blocks before them. features: with offsets from the first of these tokens.
        """
        parent = self._parent(scope, before)
        left = scope.shared_tokens - len(before) * self.block_size if scope.namespace else 0
        if not 0 < left < len(token_ids):
            return fingerprints(
                token_ids, block_size=self.block_size, parent=parent, features=features
            )
        size = self.block_size
        shared = fingerprints(token_ids[:left], block_size=size, parent=parent, features=features)
        return shared + fingerprints(
            token_ids[left:],
            block_size=size,
            parent=namespaced(shared[-1], scope.namespace),
            features=[replace(each, offset=each.offset - left) for each in features],
        )

    def _parent(self, scope: Scope, before: Sequence[Fingerprint]) -> Fingerprint:
        """Of the next block."""
        if not before:
            return self._root(scope)
        is_first = scope.namespace and len(before) * self.block_size == scope.shared_tokens
        return namespaced(before[-1], scope.namespace) if is_first else before[-1]

    def _root(self, scope: Scope) -> Fingerprint:
        return root(
            model=self.model,
            revision=self.revision,
            block_size=self.block_size,
            lora=scope.lora,
            namespace="" if scope.shared_tokens else scope.namespace,
        )
