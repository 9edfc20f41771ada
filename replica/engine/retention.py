"""The order in which the idle blocks of a KV cache are evicted.

First go the blocks of sessions that have ended, then those of requests whose conversations seldom
go on, then all others; of each kind, the longest idle goes first. With nothing said, that is LRU.
vLLM's free queue, the simulated engine and the replay use the same order.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence, Set
from itertools import chain, islice

from kvroute.contract.keep import Order, RetentionHint

NOBODY, SHARED = 0, -1  # in place of a block's session: nobody has named one; several use the block


class IdleBlocks:
    """The idle cached blocks, and the retention hints of all cached blocks.

    Blocks are numbers from 0 to capacity_blocks - 1.
    """

    def __init__(self, capacity_blocks: int) -> None:
        self._capacity_blocks = capacity_blocks
        self.clear()

    def clear(self) -> None:
        """Forget everything: no block is cached."""
        self._queues = [OrderedDict[int, None]() for _ in Order]  # each: the longest idle first
        self._order_of = [Order.USUAL] * self._capacity_blocks
        self._session_of = [NOBODY] * self._capacity_blocks
        self._owned: dict[int, dict[int, None]] = {}  # session -> its own blocks, as an ordered set

    def __len__(self) -> int:
        return sum(map(len, self._queues))

    def __iter__(self) -> Iterator[int]:
        """Return the idle blocks, the next to go first."""
        return chain.from_iterable(self._queues)

    def label(self, blocks: Sequence[int], keep: RetentionHint) -> None:
        """Record what a request says of its blocks, in the prompt's order, while it holds them.

        A session's own block is kept as the session said last. A block that others use too, or that
        no session has named, is kept as the best that was said of it. The end of one session says
        nothing of such a block.
        """
        order_of, session_of, session = self._order_of, self._session_of, keep.session
        own = self._owned.setdefault(session, {}) if session else {}
        for block in blocks:
            owner = session_of[block]
            if owner == NOBODY:
                session_of[block] = session or SHARED
                own[block] = None
            elif owner != session:
                if owner != SHARED:
                    self._disown(owner, block)
                    session_of[block] = SHARED
                order_of[block] = max(order_of[block], keep.order) or Order.USUAL
                continue
            order_of[block] = keep.order
        if session and not own:
            del self._owned[session]

    def end(self, session: int) -> None:
        """Evict the session's own blocks before all others, the last ones of the prompt first."""
        queues, order_of = self._queues, self._order_of
        for block in reversed(self._owned.get(session, {})):
            order = order_of[block]
            order_of[block] = Order.ENDED
            if order != Order.ENDED and block in queues[order]:
                del queues[order][block]
                queues[Order.ENDED][block] = None

    def put(self, blocks: Iterable[int]) -> None:
        """Add blocks that nobody holds from now on. Of one kind, the first goes first."""
        queues, order_of = self._queues, self._order_of
        for block in blocks:
            queues[order_of[block]][block] = None

    def take(self, block: int) -> None:
        """Remove a block that somebody holds again."""
        del self._queues[self._order_of[block]][block]

    def forget(self, blocks: Iterable[int]) -> None:
        """Forget what was said of held blocks, which are no longer cached."""
        for block in blocks:
            session = self._session_of[block]
            if session == NOBODY:
                continue
            self._session_of[block], self._order_of[block] = NOBODY, Order.USUAL
            if session != SHARED:
                self._disown(session, block)

    def pop(self, count: int, spared: Set[int] = frozenset()) -> list[int]:
        """Evict that many blocks, and forget what was said of them.

        Args:
            count: of blocks.
            spared: idle blocks that stay at their places.

        Raises:
            ValueError: there are too few.
        """
        gone = [*islice((block for block in self if block not in spared), count)]
        if len(gone) < count:
            raise ValueError(
                f"{count} blocks are to be evicted, but {len(self)} are idle, of which "
                f"{len(spared)} stay; ask for no more than the others"
            )
        for block in gone:
            self.take(block)
        self.forget(gone)
        return gone

    def _disown(self, session: int, block: int) -> None:
        """Remove a block from those that only this session uses."""
        own = self._owned[session]
        del own[block]
        if not own:
            del self._owned[session]
