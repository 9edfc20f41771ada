"""The order in which idle blocks of a KV cache are evicted: the least likely to be reused first.

This module has no clock and no engine. vLLM's free queue, the simulated engine and the replay all
use it.

A block has the retention hint of the last requests that used it (`Keep`). Idle blocks are in
queues, one queue for each kind of hint, and the block that has been idle longest is the head of its
queue. The next block to evict is the head with the largest (idle time - retention time) / chance of
reuse. A block is reused with a probability of about chance / idle time, so this is the block that
is least likely to be reused now. Without hints there is one queue, so the order is LRU.

If a hint has a retention time, its blocks have a *promise*: they are evicted last until that time
is over, as long as promises do not hold more than PROMISED_SHARE of the cache.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from heapq import merge

from kvroute.contract.keep import KEEP, Keep
from kvroute.replica.engine.idle_heads import LOOK_S, Among, Heads
from kvroute.replica.engine.idle_queue import (
    ENDED,
    LEARNED,
    Idle,
    IdleQueue,
    Kind,
    better,
    kind_of,
)
from kvroute.replica.engine.kv_events import Evictions

PROMISED_SHARE = 0.5  # maximum share of the cache for idle blocks with a promise
SHARED_LOOK_S = 5.0  # seconds between two checks for expired promises on shared blocks
# Values in the place of a block's session: the block has no session yet, or it is shared by several
# sessions or by requests without a session.
NO_SESSION, SHARED = 0, -1


class IdleBlocks:
    """The idle cached blocks, and the retention hints of all cached blocks.

    Blocks are numbers from 0 to capacity_blocks - 1. Times are seconds of any one clock.
    """

    def __init__(self, capacity_blocks: int) -> None:
        self._capacity_blocks = capacity_blocks
        self._cap = capacity_blocks * PROMISED_SHARE
        self._evicted = Counter[str]()
        self.clear()

    def clear(self) -> None:
        """Forget all blocks and hints."""
        self._queues: dict[Kind, IdleQueue] = {}
        self._plain: list[IdleQueue] = []  # all queues without a promise
        # Queues with a promise that have blocks, and some that have become empty.
        self._promised: dict[IdleQueue, None] = {}
        self._looked_s = -math.inf  # time of the last check for expired promises
        self._looked_at_shared_s = -math.inf  # time of the last such check of shared blocks
        self._usual, self._ended = self._queue(kind_of(KEEP)), self._queue(ENDED)
        self._heads: Heads | None = None
        # For each block, the queue in which it is when it is idle.
        self._queue_of = [self._usual] * self._capacity_blocks
        self._session_of = [NO_SESSION] * self._capacity_blocks
        self._owned: dict[int, dict[int, None]] = {}  # session -> its own blocks, as a sorted set
        self._ended_sessions: set[int] = set()  # ended sessions that have blocks and no newer hint
        self._until_s: dict[int, float] = {}  # shared block with a promise -> time when it expires
        # Shared blocks that got a promise since the last `put` or the last check for expired ones.
        self._just_promised: dict[int, None] = {}
        self._has_hints = False  # True once a request had another hint than the default
        self._silent: set[int] = set()  # blocks that were labelled with the default before that
        self._size = 0  # number of idle blocks

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[int]:
        """Yield the idle blocks, in no particular order."""
        for queue in (*self._plain, *self._promised):
            yield from queue.blocks

    def label(self, blocks: Sequence[int], keep: Keep) -> None:
        """Set the retention hint of a request's blocks, which may be held or idle.

        The blocks are in the prompt's order. A block that only one session uses has the session's
        last hint. A block that several sessions use, or requests without a session, has the best
        hint of all its requests, so the end of one session does not change it. A promise on such a
        block expires `still_s` after it was made, even if the block is used meanwhile.
        """
        if not self._has_hints:
            if keep == KEEP:
                self._silent.update(blocks)
                return
            self._start_hints()
        session, own = max(keep.session, 0), self._queue(kind_of(keep))
        shared = self._shared_with(own)
        queue_of, session_of = self._queue_of, self._session_of
        own_blocks = self._owned.setdefault(session, {}) if session else {}
        self._ended_sessions.discard(session)
        moved: dict[IdleQueue, list[Idle]] = {}
        for block in blocks:
            old, owner = queue_of[block], session_of[block]
            if owner == NO_SESSION:
                session_of[block] = session or SHARED
                own_blocks[block] = None
                queue = own
            elif owner == session:
                queue = own
            else:
                if owner != SHARED:
                    self._disown(owner, block)
                    session_of[block] = SHARED
                queue = shared(old)
                if queue.still_s and (owner != SHARED or own.still_s == queue.still_s):
                    self._just_promised[block] = None
            if queue is not old:
                queue_of[block] = queue
                if block in old.blocks:
                    moved.setdefault(queue, []).append((block, old.blocks.pop(block)))
        if not session and own.still_s:
            promised = [block for block in blocks if queue_of[block].still_s == own.still_s]
            self._just_promised |= dict.fromkeys(promised)
        if session and not own_blocks:
            del self._owned[session]
        if moved:
            self._heads = None
        for queue, idle in moved.items():
            self._insert(queue, idle[::-1])

    def end(self, session: int) -> None:
        """End a session: blocks that only it uses are evicted first.

        Of these, the prompt's last blocks come first. A second call has no effect.
        """
        if session not in self._owned or session in self._ended_sessions:
            return
        self._ended_sessions.add(session)
        queue_of, ended = self._queue_of, self._ended
        idle: list[Idle] = []
        for block in reversed(self._owned[session]):
            since_s = queue_of[block].blocks.pop(block, None)
            queue_of[block] = ended
            if since_s is not None:
                idle.append((block, since_s))
        self._insert(ended, idle)

    def put(self, blocks: Sequence[int], now_s: float) -> None:
        """Add blocks that have become idle; of one kind, the first of them is evicted first."""
        if self._just_promised:
            self._start_promises(now_s)
        queue_of, last = self._queue_of, None
        for block in blocks:
            queue = queue_of[block]
            queue.blocks[block] = now_s
            if queue is not last:
                last = queue
                if queue.still_s:
                    self._promised[queue] = None
        self._size += len(blocks)
        if self._promised and now_s > self._looked_s + LOOK_S:
            self._end_promises(now_s)

    def take(self, block: int) -> None:
        """Remove a block that is held again."""
        del self._queue_of[block].blocks[block]
        self._size -= 1

    def forget(self, blocks: Iterable[int]) -> None:
        """Forget the hints of held blocks that are no longer cached."""
        if not self._has_hints:
            self._silent.difference_update(blocks)
            return
        session_of, queue_of, usual = self._session_of, self._queue_of, self._usual
        for block in blocks:
            session = session_of[block]
            if session != NO_SESSION:
                session_of[block], queue_of[block] = NO_SESSION, usual
                if session != SHARED:
                    self._disown(session, block)
                else:
                    self._until_s.pop(block, None)
                    self._just_promised.pop(block, None)

    def pop(self, count: int, now_s: float, spared: Set[int] = frozenset()) -> list[int]:
        """Evict blocks, and forget their hints.

        Between kinds, the order is that of a moment ago (idle_heads.py).

        Args:
            count: The number of blocks.
            now_s: The current time.
            spared: Idle blocks that are not evicted and stay at their places.

        Raises:
            ValueError: There are too few blocks.
        """
        if count > self._size - len(spared):
            raise ValueError(
                f"cannot evict {count} blocks: only {self._size} are idle, and {len(spared)} of "
                "them are spared"
            )
        if now_s > self._looked_s + LOOK_S:
            self._end_promises(now_s)
        evicted: list[int] = []
        skipped: list[tuple[IdleQueue, Idle]] = []  # spared blocks that were heads of queues
        while len(evicted) < count:
            (queue, until_s, most), before = self._next(now_s), len(evicted)
            blocks, popitem = queue.blocks, queue.blocks.popitem
            for _ in range(min(most, count - before, len(blocks))):
                block, since_s = popitem(last=False)
                if block in spared:
                    skipped.append((queue, (block, since_s)))
                    self._size -= 1
                    break
                if since_s > until_s and len(evicted) > before:  # another queue's head is next
                    blocks[block] = since_s
                    blocks.move_to_end(block, last=False)
                    break
                evicted.append(block)
            self._count_evicted(queue, len(evicted) - before)
        if skipped:
            self._restore(skipped)
        self.forget(evicted)
        return evicted

    def in_order(self, now_s: float) -> Iterator[int]:
        """Yield all blocks in the order of eviction, as if no promise were ignored."""
        aged = [queue.aged(now_s) for queue in (*self._plain, *self._promised)]
        return (block for _, block in merge(*aged, key=lambda pair: -pair[0]))

    def evictions(self) -> Evictions | None:
        """Return the evictions since the last call, or None if there were none."""
        if not self._evicted:
            return None
        evicted, self._evicted = self._evicted, Counter()
        return Evictions(**evicted)

    def _queue(self, kind: Kind) -> IdleQueue:
        queue = self._queues.get(kind)
        if queue is None:
            queue = self._queues[kind] = IdleQueue(kind)
            if not kind.still:
                self._plain.append(queue)
        return queue

    def _shared_with(self, own: IdleQueue) -> Callable[[IdleQueue], IdleQueue]:
        """Return a function that maps a shared block's queue to its new queue.

        `own` is the queue of the hint that the request gives. If all hints of the block say that
        their sessions have ended, it goes to the usual queue: other sessions may still use it.
        """
        usual = self._usual.kind
        queues: dict[IdleQueue, IdleQueue] = {}

        def shared(old: IdleQueue) -> IdleQueue:
            queue = queues.get(old)
            if queue is None:
                kind = better(old.kind, own.kind)
                queue = queues[old] = self._queue(usual if kind == ENDED else kind)
            return queue

        return shared

    def _start_hints(self) -> None:
        """Note the first hint. All blocks of earlier requests, without hints, become shared."""
        self._has_hints = True
        for block in self._silent:
            self._session_of[block] = SHARED
        self._silent.clear()

    def _start_promises(self, now_s: float) -> None:
        """Set the time at which new promises on shared blocks expire."""
        for block in self._just_promised:
            self._until_s[block] = now_s + self._queue_of[block].still_s
        self._just_promised.clear()

    def _disown(self, session: int, block: int) -> None:
        """Remove a block from the blocks that only this session uses."""
        own = self._owned[session]
        del own[block]
        if not own:
            del self._owned[session]
            self._ended_sessions.discard(session)

    def _insert(self, queue: IdleQueue, idle: Sequence[Idle]) -> None:
        if idle:
            queue.insert(idle)
            if queue.still_s:
                self._promised[queue] = None

    def _end_promises(self, now_s: float) -> None:
        """Move blocks whose promise has expired to the queue without a promise.

        They count as idle since the time at which the promise expired. If the last check was
        recent, the current time is used instead, which is nearly the same.
        """
        quiet_s, self._looked_s = now_s - self._looked_s, now_s
        self._heads = None  # promised blocks that became idle since may be older than its heads
        if self._just_promised:
            self._start_promises(now_s)
        queue_of, until_s, is_late = self._queue_of, self._until_s, quiet_s > 2 * LOOK_S
        for queue in [*self._promised]:
            blocks, limit_s = queue.blocks, now_s - queue.still_s
            if blocks and next(iter(blocks.values())) > limit_s:
                continue
            plain, expired = self._queue(Kind(queue.kind.halvings)), list[Idle]()
            for block, since_s in queue.take_until(limit_s):
                queue_of[block] = plain
                end_s = until_s.pop(block, math.inf)
                expired.append((block, min(since_s + queue.still_s, end_s) if is_late else now_s))
            self._insert(plain, expired)
            if not blocks:
                del self._promised[queue]
        if now_s > self._looked_at_shared_s + SHARED_LOOK_S:
            self._looked_at_shared_s = now_s
            self._end_shared_promises(now_s)

    def _end_shared_promises(self, now_s: float) -> None:
        """End expired promises on shared blocks, also if they are held or have just become idle."""
        moved: dict[IdleQueue, list[Idle]] = {}
        for block in [block for block, until_s in self._until_s.items() if until_s <= now_s]:
            until_s, old = self._until_s.pop(block), self._queue_of[block]
            plain = self._queue_of[block] = self._queue(Kind(old.kind.halvings))
            if (since_s := old.blocks.pop(block, None)) is not None:
                moved.setdefault(plain, []).append((block, max(since_s, until_s)))
        for plain, idle in moved.items():
            plain.insert(idle)

    def _next(self, now_s: float) -> tuple[IdleQueue, float, int]:
        """Return the queue whose head is evicted next.

        Returns:
            The queue; the time since which its further blocks must have been idle to be evicted
            before the heads of other queues; and the maximum number of blocks to evict from it.
        """
        if ended := len(self._ended.blocks):
            return self._ended, math.inf, ended
        plain = sum([len(queue.blocks) for queue in self._plain])
        beyond = self._size - plain - self._cap
        among = Among.BEYOND if beyond > 0 else Among.PLAIN if plain else Among.PROMISED
        heads = self._heads
        head = heads.next() if heads and heads.holds(among, now_s) else None
        if head is None:
            self._heads = self._ordered(among, now_s)
            head = self._heads.next()
        assert head is not None, "there are idle blocks, but no queue has any"
        queue, until_s, left = head
        most = min(left, beyond) if queue.still_s and beyond > 0 else self._size
        return queue, until_s, math.ceil(most)

    def _restore(self, skipped: Sequence[tuple[IdleQueue, Idle]]) -> None:
        """Put blocks back to the heads of their queues, where they were."""
        for queue, (block, since_s) in reversed(skipped):
            queue.blocks[block] = since_s
            queue.blocks.move_to_end(block, last=False)
        self._size += len(skipped)
        self._heads = None

    def _count_evicted(self, queue: IdleQueue, blocks: int) -> None:
        self._evicted[queue.why] += blocks
        self._size -= blocks
        if self._heads is not None:
            self._heads.went(queue, blocks)

    def _ordered(self, among: Among, now_s: float) -> Heads:
        if among is Among.PLAIN:
            return Heads(among, self._plain, {}, now_s)
        if among is Among.PROMISED:
            return Heads(among, self._promised, {}, now_s)
        ignored = self._beyond_cap()
        broken = [queue for queue in self._promised if queue.kind.tenant in ignored]
        return Heads(among, [*self._plain, *broken], ignored, now_s)

    def _beyond_cap(self) -> dict[int, int]:
        """Return the number of promises to ignore for each tenant's class, if there are too many.

        Promises with learned retention times are ignored first, then those of the tenants that hold
        more blocks than their fair share.
        """
        held = Counter[int]()
        for queue in self._promised:
            if queue.blocks:
                held[queue.kind.tenant] += len(queue.blocks)
        beyond, fair = held.total() - self._cap, self._cap / len(held)
        if learned := held[LEARNED]:
            return {LEARNED: min(math.ceil(beyond), learned)}
        return {
            tenant: math.ceil(min(beyond, blocks - fair))
            for tenant, blocks in held.items()
            if blocks > fair
        }
