"""The order in which the idle blocks of a KV cache are evicted.

There are three kinds of blocks, the values of Order. Blocks of sessions that have ended are evicted
first. Then come blocks of conversations that are unlikely to continue, and then all other blocks.
Of each kind, the least recently used block is evicted first. Without retention hints, this order is
LRU. The queue for vLLM's block pools, the simulated engine and `kvroute replay` all use it.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence, Set
from itertools import chain, islice

from kvroute.contract.keep import Order, RetentionHint

# Values in place of a block's session.
NO_SESSION = 0  # no request has used the block since it was cached
SHARED = -1  # several sessions, or requests without a session, have used the block


class IdleBlocks:
    """The idle blocks of a cache, and the retention of all its cached blocks.

    A block is idle if it is cached and no request holds it. Blocks are numbers from 0 to
    capacity_blocks - 1.
    """

    def __init__(self, capacity_blocks: int) -> None:
        self._capacity_blocks = capacity_blocks
        self.clear()

    def clear(self) -> None:
        """Remove all blocks, because none is cached any more."""
        # Idle blocks of each kind. In each queue, the least recently used block is first.
        self._queues = [OrderedDict[int, None]() for _ in Order]
        self._order_of = [Order.USUAL] * self._capacity_blocks
        self._session_of = [NO_SESSION] * self._capacity_blocks
        # Session -> the blocks that only this session has used, as an ordered set.
        self._owned: dict[int, dict[int, None]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._queues))

    def __iter__(self) -> Iterator[int]:
        """Return the idle blocks in the order of eviction."""
        return chain.from_iterable(self._queues)

    def label(self, blocks: Sequence[int], hint: RetentionHint) -> None:
        """Set the retention of a request's blocks, while the request still holds them.

        If only one session has used a block, the session's last hint counts. If other sessions or
        requests without a session have used it, too, the hint that retains the block longest
        counts, and the end of a session does not affect the block.

        Args:
            blocks: The request's blocks, in the prompt's order.
            hint: The request's retention hint.
        """
        order_of, session_of, session = self._order_of, self._session_of, hint.session
        own = self._owned.setdefault(session, {}) if session else {}
        for block in blocks:
            owner = session_of[block]
            if owner == NO_SESSION:
                session_of[block] = session or SHARED
                own[block] = None
            elif owner != session:
                if owner != SHARED:
                    self._disown(owner, block)
                    session_of[block] = SHARED
                order_of[block] = max(order_of[block], hint.order) or Order.USUAL
                continue
            order_of[block] = hint.order
        if session and not own:
            del self._owned[session]

    def end(self, session: int) -> None:
        """Mark the blocks that only this session has used, so that they are evicted first.

        Among them, the last blocks of the prompt are evicted first.
        """
        queues, order_of = self._queues, self._order_of
        for block in reversed(self._owned.get(session, {})):
            order = order_of[block]
            order_of[block] = Order.ENDED
            if order != Order.ENDED and block in queues[order]:
                del queues[order][block]
                queues[Order.ENDED][block] = None

    def put(self, blocks: Iterable[int]) -> None:
        """Add blocks that have become idle. Of each kind, the first one is evicted first."""
        queues, order_of = self._queues, self._order_of
        for block in blocks:
            queues[order_of[block]][block] = None

    def take(self, block: int) -> None:
        """Remove an idle block, because a request holds it again."""
        del self._queues[self._order_of[block]][block]

    def forget(self, blocks: Iterable[int]) -> None:
        """Forget the retention of blocks that are not idle and are no longer cached."""
        for block in blocks:
            session = self._session_of[block]
            if session == NO_SESSION:
                continue
            self._session_of[block], self._order_of[block] = NO_SESSION, Order.USUAL
            if session != SHARED:
                self._disown(session, block)

    def pop(self, count: int, protected: Set[int] = frozenset()) -> list[int]:
        """Evict the next `count` idle blocks, and return them.

        Args:
            count: The number of blocks to evict.
            protected: Idle blocks that must not be evicted.

        Raises:
            ValueError: Fewer than `count` idle blocks can be evicted. None is evicted then.
        """
        evicted = [*islice((block for block in self if block not in protected), count)]
        if len(evicted) < count:
            raise ValueError(
                f"cannot evict {count} blocks: {len(self)} blocks are idle, and {len(protected)} "
                f"of them are protected; evict at most {len(evicted)} blocks"
            )
        for block in evicted:
            self.take(block)
        self.forget(evicted)
        return evicted

    def _disown(self, session: int, block: int) -> None:
        """Remove a block from the blocks that only this session has used."""
        own = self._owned[session]
        del own[block]
        if not own:
            del self._owned[session]
