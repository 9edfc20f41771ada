"""Every replica is told of a conversation that has ended: its blocks may lie on several."""

import asyncio

from kvroute.contract.keep import Order
from kvroute.router.connections.links import Links, UnansweredError
from kvroute.router.placement.attempts import Attempt, RequestObserver

TELL_S = 2.0  # the longest wait for a replica to take note
WAITING = 1000  # ended conversations; further ones end on one replica only
AT_ONCE = 16  # conversations


async def end_session(links: Links, session: int) -> dict[str, str]:
    """End a session on all ranks at once; return the ranks that did not confirm it, and why."""
    ranks = links.running()
    reasons = await asyncio.gather(*(_tell(links, rank, session) for rank in ranks))
    return {rank: why for rank, why in zip(ranks, reasons, strict=True) if why}


async def _tell(links: Links, rank: str, session: int) -> str:
    """Empty: it has been told."""
    try:
        await links.call(rank, "end_session", session.to_bytes(8, "little"), within_s=TELL_S)
    except UnansweredError as error:
        return str(error)
    return ""


class EndedSessions(RequestObserver):
    """Sessions whose last request, as their clients declared it, has ended.

    If too many declarations of a client are wrong, they are ignored, and replicas do not get them.
    """

    def __init__(self) -> None:
        self._waiting: dict[int, None] = {}  # sessions whose end is to be reported, in order
        self._has_some = asyncio.Event()

    def ended(self, attempt: Attempt) -> None:
        retention = attempt.context.retention
        if retention is None or not attempt.is_over or len(self._waiting) >= WAITING:
            return
        if retention.turn.is_last and retention.keep.order == Order.ENDED:
            self._waiting[retention.turn.session] = None
            self._has_some.set()

    async def run(self, links: Links) -> None:
        """Report ended sessions to the replicas until cancelled."""
        while True:
            await self._has_some.wait()
            sessions = [*self._waiting][:AT_ONCE]
            await asyncio.gather(*(end_session(links, session) for session in sessions))
            for session in sessions:
                self._waiting.pop(session)
            if not self._waiting:
                self._has_some.clear()
