"""The order in which the idle blocks of a KV cache are evicted: first what comes back least likely.

No clock and no engine: vLLM's free queue, the simulated engine and the replay use the same order.

A block is kept as its last requests have said (`Keep`). Idle blocks lie in queues, one for each
kind of Keep, the longest idle first. The next to go is the head of a queue: the one with the
largest (idle - still) / chance. Returns come with a probability of about chance / idle, so this is
the block whose return is the least likely now. With nothing said there is one queue: LRU.
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

PROMISED_SHARE = 0.5  # of the cache, that idle blocks with a promise may hold
SHARED_LOOK_S = 5.0  # between two looks for promises that are over, on blocks of several sessions
UNTOLD, SHARED = 0, -1  # in the place of a block's session: nobody's yet, and several sessions'


class IdleBlocks:
    """The cached blocks that nobody holds, and what was said of all cached blocks.

    Blocks are numbers from 0 to capacity_blocks - 1. Times are seconds of any one clock.
    """

    def __init__(self, capacity_blocks: int) -> None:
        self._capacity_blocks = capacity_blocks
        self._cap = capacity_blocks * PROMISED_SHARE
        self._evicted = Counter[str]()
        self.clear()

    def clear(self) -> None:
        """No block is cached."""
        self._queues: dict[Kind, IdleQueue] = {}
        self._plain: list[IdleQueue] = []  # all without a promise
        self._promised: dict[IdleQueue, None] = {}  # with blocks, and some that have become empty
        self._looked_s = -math.inf  # for promises whose time is over
        self._looked_at_shared_s = -math.inf
        self._usual, self._ended = self._queue(kind_of(KEEP)), self._queue(ENDED)
        self._heads: Heads | None = None
        self._queue_of = [self._usual] * self._capacity_blocks  # of each block when it is idle
        self._session_of = [UNTOLD] * self._capacity_blocks
        self._owned: dict[int, dict[int, None]] = {}  # session -> its own blocks, as a sorted set
        self._over: set[int] = set()  # sessions with blocks, and nothing said since their end
        self._until_s: dict[int, float] = {}  # SHARED block with a promise -> when that is over
        self._just_promised: dict[int, None] = {}  # SHARED blocks, since the last put or look
        self._is_told = False  # anything but the default, at any time
        self._silent: set[int] = set()  # blocks of requests that said the default before
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[int]:
        """In no order."""
        for queue in (*self._plain, *self._promised):
            yield from queue.blocks

    def label(self, blocks: Sequence[int], keep: Keep) -> None:
        """What a request says of all its blocks, in the prompt's order; they may be held or idle.

        A session's own block is kept as the session said last. One that others use too, or that no
        session has named, is kept as the best that was said of it: the end of one session is none
        of theirs. A promise on such a block is over still_s after it was made, whoever uses the
        block meanwhile.
        """
        if not self._is_told:
            if keep == KEEP:
                self._silent.update(blocks)
                return
            self._begin()
        session, own = max(keep.session, 0), self._queue(kind_of(keep))
        shared = self._shared_with(own)
        queue_of, session_of = self._queue_of, self._session_of
        mine = self._owned.setdefault(session, {}) if session else {}
        self._over.discard(session)
        moved: dict[IdleQueue, list[Idle]] = {}
        for block in blocks:
            old, owner = queue_of[block], session_of[block]
            if owner == UNTOLD:
                session_of[block] = session or SHARED
                mine[block] = None
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
            same = [block for block in blocks if queue_of[block].still_s == own.still_s]
            self._just_promised |= dict.fromkeys(same)
        if session and not mine:
            del self._owned[session]
        if moved:
            self._heads = None
        for queue, idle in moved.items():
            self._insert(queue, idle[::-1])

    def end(self, session: int) -> None:
        """The session will not come back: its own blocks go first, the prompt's last ones before
        all others. A second end moves nothing."""
        if session not in self._owned or session in self._over:
            return
        self._over.add(session)
        queue_of, ended = self._queue_of, self._ended
        idle: list[Idle] = []
        for block in reversed(self._owned[session]):
            since_s = queue_of[block].blocks.pop(block, None)
            queue_of[block] = ended
            if since_s is not None:
                idle.append((block, since_s))
        self._insert(ended, idle)

    def put(self, blocks: Sequence[int], now_s: float) -> None:
        """Nobody holds them from now on. Of one kind, the first of them is evicted first."""
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
        """Somebody holds it again."""
        del self._queue_of[block].blocks[block]
        self._size -= 1

    def forget(self, blocks: Iterable[int]) -> None:
        """Held blocks with nothing that could be found again."""
        if not self._is_told:
            self._silent.difference_update(blocks)
            return
        session_of, queue_of, usual = self._session_of, self._queue_of, self._usual
        for block in blocks:
            session = session_of[block]
            if session != UNTOLD:
                session_of[block], queue_of[block] = UNTOLD, usual
                if session != SHARED:
                    self._disown(session, block)
                else:
                    self._until_s.pop(block, None)
                    self._just_promised.pop(block, None)

    def pop(self, count: int, now_s: float, spared: Set[int] = frozenset()) -> list[int]:
        """Evicts that many blocks. What was said of them is forgotten.

        spared: idle blocks that stay, at their places. Between kinds, the order is that of a moment
        ago (idle_heads.py). Raises ValueError: there are too few.
        """
        if count > self._size - len(spared):
            raise ValueError(
                f"{count} blocks are to be evicted, but {self._size} are idle, of which "
                f"{len(spared)} stay; ask for no more than the others"
            )
        if now_s > self._looked_s + LOOK_S:
            self._end_promises(now_s)
        gone: list[int] = []
        passed: list[tuple[IdleQueue, Idle]] = []  # spared heads of queues
        while len(gone) < count:
            (queue, until_s, most), before = self._next(now_s), len(gone)
            blocks, popitem = queue.blocks, queue.blocks.popitem
            for _ in range(min(most, count - before, len(blocks))):
                block, since_s = popitem(last=False)
                if block in spared:
                    passed.append((queue, (block, since_s)))
                    self._size -= 1
                    break
                if since_s > until_s and len(gone) > before:  # another queue's head is next
                    blocks[block] = since_s
                    blocks.move_to_end(block, last=False)
                    break
                gone.append(block)
            self._went(queue, len(gone) - before)
        if passed:
            self._restore(passed)
        self.forget(gone)
        return gone

    def in_order(self, now_s: float) -> Iterator[int]:
        """All blocks, the next to go first, while nothing changes and no promise is ignored."""
        aged = [queue.aged(now_s) for queue in (*self._plain, *self._promised)]
        return (block for _, block in merge(*aged, key=lambda each: -each[0]))

    def evictions(self) -> Evictions | None:
        """Since the last call; None: there were none."""
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
        """The queue of blocks that one more request uses, by the queue they are in. Its end says
        nothing of them, but that they are of use to others than the one that has ended before."""
        usual = self._usual.kind
        found: dict[IdleQueue, IdleQueue] = {}

        def shared(old: IdleQueue) -> IdleQueue:
            queue = found.get(old)
            if queue is None:
                kind = better(old.kind, own.kind)
                queue = found[old] = self._queue(usual if kind == ENDED else kind)
            return queue

        return shared

    def _begin(self) -> None:
        """Something is told. What requests have left that told nothing is no session's own."""
        self._is_told = True
        for block in self._silent:
            self._session_of[block] = SHARED
        self._silent.clear()

    def _start_promises(self, now_s: float) -> None:
        """Those that were just made on blocks of several sessions."""
        for block in self._just_promised:
            self._until_s[block] = now_s + self._queue_of[block].still_s
        self._just_promised.clear()

    def _disown(self, session: int, block: int) -> None:
        """It is not the session's own any longer."""
        own = self._owned[session]
        del own[block]
        if not own:
            del self._owned[session]
            self._over.discard(session)

    def _insert(self, queue: IdleQueue, idle: Sequence[Idle]) -> None:
        if idle:
            queue.insert(idle)
            if queue.still_s:
                self._promised[queue] = None

    def _end_promises(self, now_s: float) -> None:
        """Blocks whose time is over go on as if they had become idle at that time; at this look's
        time, which is nearly the same, if the last one was not long ago."""
        quiet_s, self._looked_s = now_s - self._looked_s, now_s
        self._heads = None  # promised blocks that came since may go before the old heads
        if self._just_promised:
            self._start_promises(now_s)
        queue_of, until_s, is_late = self._queue_of, self._until_s, quiet_s > 2 * LOOK_S
        for queue in [*self._promised]:
            blocks, limit_s = queue.blocks, now_s - queue.still_s
            if blocks and next(iter(blocks.values())) > limit_s:
                continue
            plain, over = self._queue(Kind(queue.kind.halvings)), list[Idle]()
            for block, since_s in queue.take_until(limit_s):
                queue_of[block] = plain
                end_s = until_s.pop(block, math.inf)
                over.append((block, min(since_s + queue.still_s, end_s) if is_late else now_s))
            self._insert(plain, over)
            if not blocks:
                del self._promised[queue]
        if now_s > self._looked_at_shared_s + SHARED_LOOK_S:
            self._looked_at_shared_s = now_s
            self._end_shared_promises(now_s)

    def _end_shared_promises(self, now_s: float) -> None:
        """Also on blocks that are held, or that became idle not long ago."""
        moved: dict[IdleQueue, list[Idle]] = {}
        for block in [block for block, until_s in self._until_s.items() if until_s <= now_s]:
            until_s, old = self._until_s.pop(block), self._queue_of[block]
            plain = self._queue_of[block] = self._queue(Kind(old.kind.halvings))
            if (since_s := old.blocks.pop(block, None)) is not None:
                moved.setdefault(plain, []).append((block, max(since_s, until_s)))
        for plain, idle in moved.items():
            plain.insert(idle)

    def _next(self, now_s: float) -> tuple[IdleQueue, float, int]:
        """The queue whose head goes next. Since when further blocks of it must be idle to go before
        other queues' heads, and how many may."""
        if ended := len(self._ended.blocks):
            return self._ended, math.inf, ended
        plain = sum([len(queue.blocks) for queue in self._plain])
        beyond = self._size - plain - self._cap
        among = Among.BEYOND if beyond > 0 else Among.PLAIN if plain else Among.PROMISED
        heads = self._heads
        found = heads.next() if heads and heads.holds(among, now_s) else None
        if found is None:
            self._heads = self._ordered(among, now_s)
            found = self._heads.next()
        assert found is not None, "blocks are idle, and no queue has them"
        queue, until_s, left = found
        most = min(left, beyond) if queue.still_s and beyond > 0 else self._size
        return queue, until_s, math.ceil(most)

    def _restore(self, passed: Sequence[tuple[IdleQueue, Idle]]) -> None:
        """To the heads of their queues, where they were."""
        for queue, (block, since_s) in reversed(passed):
            queue.blocks[block] = since_s
            queue.blocks.move_to_end(block, last=False)
        self._size += len(passed)
        self._heads = None

    def _went(self, queue: IdleQueue, blocks: int) -> None:
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
        """By tenant's class: blocks whose promise is ignored, as promises hold too many. Learned
        waits go first; then who holds more than others."""
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
