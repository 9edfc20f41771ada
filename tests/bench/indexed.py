"""A fleet with full caches, and prompts: the same for kvroute's router and for other routers."""

import random
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from kvroute.contract.records import EngineFacts, Load, ReplicaRecord
from kvroute.router.placement.fleet import Fleet

BLOCK = 16  # tokens in a block; the smallest usual size, which costs an index the most
REPLICAS = [f"r{i}" for i in range(64)]
BLOCKS = 1_000_000
DOCUMENT_BLOCKS = 1000
VOCABULARY = 40_000
PROMPT_TOKENS = (512, 2_048, 8_192, 16_384, 32_768, 131_072)
HOLDER = 7  # the replica that holds the first half of each prompt
UNDER_WAY = 4  # number of running requests at each replica
FACTS = EngineFacts(
    block_size=BLOCK,
    prefill_tokens_per_s=25_000.0,
    attention_tokens=32_768.0,
    capacity_blocks=50_000,
    max_model_len=131_072,
)

Tokens = NDArray[np.uint32]


def documents() -> Iterator[tuple[int, Tokens]]:
    """Yield documents that have BLOCKS different blocks in total.

    Each item is the number of the replica that has cached the document, and the document's tokens.
    """
    rng = np.random.default_rng(0)
    for i in range(BLOCKS // DOCUMENT_BLOCKS):
        tokens = rng.integers(0, VOCABULARY, DOCUMENT_BLOCKS * BLOCK, dtype=np.uint32)
        yield i % len(REPLICAS), tokens


def prompt(tokens: int) -> Tokens:
    """Return a prompt whose first half only HOLDER has cached."""
    return np.random.default_rng(tokens).integers(0, VOCABULARY, tokens, dtype=np.uint32)


def requests_in_flight() -> Iterator[tuple[int, Tokens]]:
    """Yield the replica's number and the prompt of each running request."""
    rng = np.random.default_rng(1)
    for i in range(UNDER_WAY * len(REPLICAS)):
        yield i % len(REPLICAS), rng.integers(0, VOCABULARY, 1_000, dtype=np.uint32)


def fleet() -> Fleet:
    """Return the fleet of a router that knows all these blocks and requests."""
    fleet = Fleet(model="m", revision="", block_size=BLOCK, rng=random.Random(0))
    load = Load(running=UNDER_WAY, used_blocks=250)
    fleet.update([ReplicaRecord(name, "1", 0, FACTS, load) for name in REPLICAS])
    for name in REPLICAS:
        fleet.mirror.join(name)
    for replica, tokens in documents():
        fleet.mirror.add(REPLICAS[replica], fleet.caches.chain(tokens))
    for length in PROMPT_TOKENS:
        fleet.mirror.add(REPLICAS[HOLDER], fleet.caches.chain(prompt(length)[: length // 2 + 1]))
    for i, (replica, tokens) in enumerate(requests_in_flight()):
        placement = fleet.place(tokens, REPLICAS, float(i))
        fleet.sent(placement, REPLICAS[replica], str(i), float(i))
    return fleet
