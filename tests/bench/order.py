"""The time per block of the order of eviction in vLLM's block pool: vLLM's queue and kvroute's."""

import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from kvroute.contract.keep import Order, RetentionHint
from tests.bench.report import Row, Section

BLOCKS = 50_000  # number of blocks in the pool
CHATS = 600
TURN_BLOCKS = 24  # number of blocks that a turn adds: its prompt and answer
MAX_TURNS = 8
REQUESTS = 3_000  # number of requests that are measured, after the pool is full
ROUNDS = 5  # number of rounds, which alternate between the queues
# The operations that are measured. get: take free blocks. free: return blocks. touch: use cached
# blocks again. label: give blocks their retention hint, which only kvroute's queue does.
PARTS = "get", "free", "touch", "label"

Hints = Callable[[random.Random, int], RetentionHint]  # returns the hint of a session's turn


def no_hint(rng: random.Random, session: int) -> RetentionHint:
    return RetentionHint()


def ordered(rng: random.Random, session: int) -> RetentionHint:
    """Return a hint with the session's number. Some turns are unlikely to continue."""
    return RetentionHint(rng.choice([Order.USUAL, Order.UNLIKELY]), session)


CASES: dict[str, Hints | None] = {
    "vLLM's own": None,
    "kvroute's, without hints": no_hint,
    "kvroute's, with kinds and sessions": ordered,
}


def order() -> Section:
    results: dict[str, list[dict[str, float]]] = defaultdict(list)
    for number in range(ROUNDS):
        for case, hints in CASES.items():
            results[case].append(Pool(hints, number).us_a_block())
    rows: list[Row] = []
    for case, rounds in results.items():
        row = {part: statistics.median(round_[part] for round_ in rounds) for part in PARTS}
        rows.append({"queue": case, **row, "total": sum(row.values())})
    note = f"Microseconds a block. {CHATS} chats in {BLOCKS:,} blocks; medians of {ROUNDS} rounds."
    return Section("The order of eviction in vLLM's block pool", rows, [note])


class Pool:
    """Chats on a pool with kvroute's queue, or with vLLM's queue if there are no hints."""

    def __init__(self, hints: Hints | None, seed: int) -> None:
        from vllm.v1.core.block_pool import BlockPool

        from kvroute.replica.vllm_engine.blocks.free_queue import FreeQueue

        self.pool: Any = BlockPool(BLOCKS + 1, True, 16)
        self._queue = FreeQueue(self.pool) if hints else None
        self._hints = hints or no_hint
        self._rng = random.Random(seed)
        self._spent = dict.fromkeys(PARTS, (0, 0.0))  # number of blocks, and seconds

    def us_a_block(self) -> dict[str, float]:
        """Fill the pool, then return the microseconds per block of each part."""
        chats: list[tuple[int, list[bytes]]] = [(n, []) for n in range(1, CHATS + 1)]
        for request in range(2 * REQUESTS):
            if request == REQUESTS:
                self._spent = dict.fromkeys(PARTS, (0, 0.0))
            number = self._rng.randrange(CHATS)
            session, hashes = chats[number]
            if len(hashes) >= MAX_TURNS * TURN_BLOCKS:
                session, hashes = session + CHATS, []
            hashes = hashes + [self._rng.randbytes(36) for _ in range(TURN_BLOCKS)]
            chats[number] = session, hashes
            self._turn(session, hashes)
        return {
            part: 1e6 * spent_s / max(1, blocks) for part, (blocks, spent_s) in self._spent.items()
        }

    def _turn(self, session: int, hashes: Sequence[bytes]) -> None:
        cached_blocks = self.pool.cached_block_hash_to_block
        hits: list[Any] = []
        for hash_ in hashes:
            block = cached_blocks.get_one_block(hash_)
            if block is None:
                break
            hits.append(block)
        self._timed("touch", hits, self.pool.touch)
        missing = len(hashes) - len(hits)
        new = self._timed("get", range(missing), lambda blocks: self.pool.get_new_blocks(missing))
        for hash_, block in zip(hashes[len(hits) :], new, strict=True):
            self.pool._insert_block_hash(hash_, block, num_tokens=16)
        blocks = hits + new
        if self._queue:
            keep, queue = self._hints(self._rng, session), self._queue
            self._timed("label", blocks, lambda blocks: queue.label(blocks, keep))
        self._timed("free", blocks[::-1], self.pool.free_blocks)

    def _timed(self, part: str, blocks: Sequence[Any], act: Callable[[Any], Any]) -> Any:
        began_s = time.perf_counter()
        result = act(blocks)
        count, spent_s = self._spent[part]
        self._spent[part] = count + len(blocks), spent_s + time.perf_counter() - began_s
        return result


if __name__ == "__main__":
    print(order().markdown())
