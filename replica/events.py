"""KV cache events become changes of the set of fingerprints that a replica holds."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from replica.kvindex.fingerprint import Fingerprint, fingerprints, root

BlockHash = int | bytes  # the engine's own name for a block; never leaves the replica


@dataclass(frozen=True, slots=True)
class BlockStored:
    block_hashes: Sequence[BlockHash]  # one for each block, in prompt order
    parent: BlockHash | None  # the block before the first; None at the start of a prompt
    token_ids: Sequence[int]  # block_size ids for each block
    namespace: str = ""  # cache salt; told with a prompt's first block only
    lora: str = ""


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    block_hashes: Sequence[BlockHash]


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """The engine forgot every block."""


@dataclass(frozen=True, slots=True)
class EventsLost:
    """Events went missing between the engine and us: what we knew may be wrong."""


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared | EventsLost
