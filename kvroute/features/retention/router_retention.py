"""Retention in the router of one model: what the core calls.

The ends of sessions are reported to all replicas, since several may hold blocks of a session.
"""

import asyncio
from collections.abc import Coroutine, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from kvroute.contract.keep import Order
from kvroute.features.retention.returns import Returns
from kvroute.features.router_feature import RouterFeature
from kvroute.router.api.calls import Call, objects
from kvroute.router.connections.links import Links, UnansweredError

if TYPE_CHECKING:
    from kvroute.router.api.calls import Call
    from kvroute.router.placement.attempts import Attempt
    from kvroute.router.serving.assembly import Parts

TIMEOUT_S = 2.0  # seconds for a replica to confirm that a session has ended
# Ended sessions that wait to be reported. Further ones are not reported, so only the replica that
# got the session's last request knows that the session has ended.
MAX_WAITING = 1000
PARALLEL = 16  # sessions that are reported at the same time
# Values with which a client asks to keep a prompt in the cache. OpenAI's fields have other values,
# such as `in_memory`, which do not ask for this.
TTLS = ("5m", "30m", "1h", "24h")
# Fields whose items can have a `cache_control`.
CACHEABLE_FIELDS = ("system", "tools", "messages", "input")


class RouterRetention(Returns, RouterFeature):
    """Gives hints to replicas, and reports the sessions that clients have ended.

    If too many of these declarations are wrong, they are ignored, and the sessions are not
    reported.
    """

    _parts: "Parts"  # from `attach` on

    def __init__(self) -> None:
        super().__init__()
        # Sessions whose end is to be reported.
        self._waiting = asyncio.Queue[int](MAX_WAITING)

    def attach(self, parts: "Parts") -> None:
        self._parts = parts

    def tasks(self) -> Mapping[str, Coroutine[Any, Any, None]]:
        return {"ended sessions": self.run(self._parts.links)}

    def promises(self, call: "Call") -> bool:
        return promises(call)

    def attempt_ended(self, attempt: "Attempt") -> None:
        turn, keep = attempt.context.turn, attempt.context.keep
        if turn is None or keep is None or not (turn.is_last and attempt.is_over):
            return
        if keep.order == Order.ENDED and not self._waiting.full():
            self._waiting.put_nowait(turn.session)

    async def end(self, session: int) -> dict[str, str]:
        """Record that a client has declared the end of a session, and report it to all replicas.

        Replicas evict the session's blocks first. They get no report if many sessions continued
        after clients had declared their end.

        Returns:
            The replicas' ranks that did not confirm the report: id -> reason.
        """
        parts = self._parts
        parts.fleet.end_session(session)
        for wake in parts.line_wakes:
            wake.set()
        parts.publisher.session_ended(session)
        return await report_end(parts.links, session) if self.trusts_ends else {}

    async def run(self, links: Links) -> None:
        """Report ended sessions to the replicas until cancelled."""
        await asyncio.gather(*(self._report_all(links) for _ in range(PARALLEL)))

    async def _report_all(self, links: Links) -> None:
        while True:
            await report_end(links, await self._waiting.get())


async def report_end(links: Links, session: int) -> dict[str, str]:
    """End a session on all ranks; return the ranks that did not confirm it: id -> reason."""
    ranks = links.running()
    reasons = await asyncio.gather(*(_report(links, rank, session) for rank in ranks))
    return {rank: reason for rank, reason in zip(ranks, reasons, strict=True) if reason}


async def _report(links: Links, rank: str, session: int) -> str:
    """Report the end to a rank. Return why this failed; empty if the rank has confirmed it."""
    try:
        await links.call(rank, "end_session", session.to_bytes(8, "little"), within_s=TIMEOUT_S)
    except UnansweredError as error:
        return str(error)
    return ""


def promises(call: Call) -> bool:
    """Return whether the client of a call promises to continue it.

    Unknown values are ignored, because new versions of these APIs may have new values.
    """
    return _is_marked(call) or _is_retained(call.body)


def _is_marked(call: Call) -> bool:
    """Return whether a `cache_control`, as in Anthropic's API, asks to keep part of the prompt."""
    if b"cache_control" not in call.raw:
        return False
    controls = (part.get("cache_control") for part in _cacheable(call.body))
    return any(
        isinstance(control, dict)
        and control.get("type") == "ephemeral"
        and control.get("ttl", "5m") in TTLS
        for control in controls
    )


def _cacheable(body: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield every object that can have a `cache_control`. Some clients send it in chats too."""
    yield body
    for name in CACHEABLE_FIELDS:
        for item in objects(body.get(name)):
            yield item
            yield from objects(item.get("content"))


def _is_retained(body: Mapping[str, Any]) -> bool:
    """Return whether OpenAI's fields ask to keep the prompt."""
    options = body.get("prompt_cache_options")
    ttl = options.get("ttl") if isinstance(options, dict) else None
    return ttl in TTLS or body.get("prompt_cache_retention") in TTLS
