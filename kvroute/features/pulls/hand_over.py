"""Moves the blocks of a removed replica's conversations to the replicas that remain.

When Ray Serve removes a replica, each router lets other replicas pull the blocks of the latest
prompts that it has sent to the removed one: first those of conversations that will probably
continue, and of these the latest ones. The removed replica waits until the routers have closed
their connections to it, which they do when this is done or its time is over. The blocks that arrive
are in the index like all others.
"""

import asyncio
import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, NamedTuple, get_args

from kvroute.blocks.tiers import HOST
from kvroute.contract.generation import GenerateRequest
from kvroute.contract.keep import Order, RetentionHint
from kvroute.contract.unreadable import DECODE_ERRORS
from kvroute.features.pulls.peer_pulls import Exchange, PlannedPulls
from kvroute.features.pulls.recent_prompts import RecentPrompt, RecentPrompts
from kvroute.replica.fabric.pull import MAX_WITHIN_S, Pull, PullResult, carried, decode_result
from kvroute.router.connections.links import Links, UnansweredError
from kvroute.router.dispatch.generation import Generation
from kvroute.router.placement.fleet import Fleet
from kvroute.wire.structs import MAX_ORDER_S, encode_begin

log = logging.getLogger("kvroute.dispatch")

PARALLEL = 4  # pulls of one router from one removed replica at a time
CHECK_S = 0.1  # seconds between two looks for prompts that are left

# What became of a prompt. moved: another replica has pulled its blocks. held: another replica had
# them already. dropped: its conversation has ended or was continued elsewhere, or its blocks were
# evicted or are not worth a pull. late: the time was over.
Outcome = Literal["moved", "held", "dropped", "late"]


class Receiver(NamedTuple):
    """A rank that can pull the blocks of a prompt, and what that takes."""

    rank_id: str
    exchange: Exchange
    tokens: int  # tokens of the prompt in full blocks
    blocks: int  # blocks that it lacks
    pull_s: float  # time to copy them
    computing_s: float  # time to compute them


class HandOver:
    """Hands over what removed replicas have cached of one router's conversations.

    Args:
        fleet: the replicas.
        pulls: the pulls of requests.
        links: the connections to them.
        targets: returns the ranks that can get requests.
        within_s: the longest time of a hand-over; 0: there is none.
    """

    def __init__(
        self,
        fleet: Fleet,
        pulls: PlannedPulls,
        links: Links,
        targets: Callable[[], Sequence[str]],
        *,
        within_s: float,
    ) -> None:
        self.outcomes: dict[Outcome, int] = dict.fromkeys(get_args(Outcome), 0)
        self.tokens = 0  # tokens whose blocks were pulled
        self._fleet = fleet
        self._pulls = pulls
        self._links = links
        self._targets = targets
        self._within_s = within_s
        self._prompts = RecentPrompts()
        self._jobs: dict[str, asyncio.Task[None]] = {}  # removed replica -> its hand-over
        self._tasks: asyncio.TaskGroup | None = None  # None: `run` does not run
        links.is_needed = self.is_needed

    def remember(self, generation: Generation) -> None:
        """Remember a prompt that has its first token.

        Prompts with images are left out, since a pull has only token ids, and so are prompts whose
        blocks are evicted first, for example those of batch requests.
        """
        rank_id, sent = generation.replica_id, generation.sent
        source = self._pulls.exchanges.get(rank_id)
        if self._within_s <= 0 or source is None or not source.address or sent.media:
            return
        keep = sent.keep or RetentionHint()
        if sent.turn is not None and keep.order != Order.ENDED:
            self._prompts.store(
                RecentPrompt(
                    generation.token_ids, generation.scope, sent.turn, keep, rank_id, source
                )
            )

    async def run(self) -> None:
        """Run all hand-overs until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            await asyncio.Future()

    def is_needed(self, replica_id: str) -> bool:
        """Return whether a removed replica has to stay connected, because it is handed over.

        The first call for a replica starts the hand-over.
        """
        if self._tasks is None:
            return False
        if replica_id not in self._jobs:
            busy = self._links.busy()
            self._jobs = {id_: j for id_, j in self._jobs.items() if id_ in busy or not j.done()}
            work = self._hand_over(replica_id)
            self._jobs[replica_id] = self._tasks.create_task(work, name=f"hand over {replica_id}")
        return not self._jobs[replica_id].done()

    async def _hand_over(self, replica_id: str) -> None:
        """Move prompts until none is left and no request runs there, or the time is over."""
        ends_s, received = time.monotonic() + self._within_s, Counter[str]()
        while (left := self._prompts.on(replica_id)) or replica_id in self._links.busy():
            if time.monotonic() >= ends_s or not self._links.is_connected(replica_id):
                break
            # Blocks that stay longest by the order of eviction go first. The sort is stable.
            prompts = iter(sorted(left, key=lambda prompt: -prompt.keep.order))
            async with asyncio.TaskGroup() as tasks:
                for _ in range(PARALLEL):
                    tasks.create_task(self._move_all(prompts, received, ends_s))
            await asyncio.sleep(CHECK_S)
        self.outcomes["late"] += len(left)
        for prompt in left:
            self._prompts.forget(prompt.turn.end)

    async def _move_all(
        self, prompts: Iterator[RecentPrompt], received: Counter[str], ends_s: float
    ) -> None:
        for prompt in prompts:
            if time.monotonic() >= ends_s:
                return
            try:
                outcome = await self._move(prompt, received, ends_s)
            except Exception:  # a fault of a hand-over must not end the router
                log.exception("the blocks of a conversation cannot be handed over")
                outcome = "dropped"
            if outcome is not None:
                self.outcomes[outcome] += 1
            if outcome == "dropped":
                self._prompts.forget(prompt.turn.end)
            await asyncio.sleep(0)  # let requests run

    async def _move(
        self, prompt: RecentPrompt, received: Counter[str], ends_s: float
    ) -> Outcome | None:
        """Let another replica pull a prompt's blocks; return None to try it again.

        Args:
            received: blocks that each rank has got in this hand-over.
        """
        turn = prompt.turn
        if not self._fleet.turns.knows(turn):
            return "dropped"
        to = min(self._receivers(prompt), key=lambda to: _cost(to, received), default=None)
        if to is None:
            return "dropped"
        if not to.blocks:
            self._prompts.move(turn.end, to.rank_id, to.exchange)
            return "held"
        if to.pull_s >= to.computing_s or not self._has_space(received):
            return "dropped"
        if not self._pulls.links.is_open(prompt.rank_id, to.rank_id, time.monotonic()):
            return None
        received[to.rank_id] += to.blocks
        result = await self._pull(prompt, to, ends_s)
        if result is None or (result.reason in ("lost", "refused") and not result.tokens):
            received[to.rank_id] -= to.blocks
            return None
        self.tokens += result.tokens
        if result.reason and not result.tokens:
            return "dropped"
        self._prompts.move(turn.end, to.rank_id, to.exchange)
        return "moved"

    def _receivers(self, prompt: RecentPrompt) -> Iterator[Receiver]:
        """Yield the ranks that can pull the prompt's blocks."""
        fleet, size = self._fleet, self._fleet.caches.block_size
        chain = fleet.caches.chain(prompt.token_ids, prompt.scope)
        hits = fleet.caches.find(chain, time.monotonic()).blocks
        for rank_id in self._targets():
            exchange, load = self._pulls.exchanges.get(rank_id), fleet.loads.of(rank_id)
            if exchange is None or not exchange.speed or exchange.format != prompt.source.format:
                continue
            if prompt.scope.variant and prompt.scope.variant not in load.variants:
                continue
            hit = hits.get(rank_id, 0)
            blocks, end = len(chain) - hit, len(chain) * size
            slowness = self._pulls.links.slowness(prompt.rank_id, rank_id)
            pull_s = self._pulls.copying_s(rank_id, blocks, slowness=slowness)
            computing_s = load.computing_s(hit * size, end)
            yield Receiver(rank_id, exchange, end, blocks, pull_s, computing_s)

    def _has_space(self, received: Counter[str]) -> bool:
        """Return whether other replicas should evict blocks of their own for more blocks.

        If one of n + 1 equal replicas leaves, n of n + 1 blocks can stay in host memory. So of the
        removed replica's blocks, the latest n of n + 1 are moved.
        """
        tiers = map(self._fleet.replicas.tiers.get, self._targets())
        sizes = [facts[HOST].blocks for facts in tiers if facts and HOST in facts]
        return received.total() * (len(sizes) + 1) < sum(sizes)

    async def _pull(self, prompt: RecentPrompt, to: Receiver, ends_s: float) -> PullResult | None:
        """Let a rank pull a prompt's blocks; return None if it does not answer."""
        access, now_s = self._pulls.access(prompt.rank_id), time.monotonic()
        if access is None or to.exchange.speed is None:
            return None
        pulls, left_s = self._pulls, ends_s - now_s
        wait_s = pulls.links.wait_s(prompt.rank_id, to.rank_id, now_s)
        # After this time, computing the blocks would have been faster.
        within_s = min(left_s, wait_s + to.pull_s + to.computing_s, MAX_WITHIN_S)
        address = prompt.source.address
        pull = Pull(prompt.rank_id, address, access.key, to.tokens, within_s, access.tls)
        request = GenerateRequest(
            f"hand-over-{secrets.token_hex(8)}",
            prompt.token_ids[: to.tokens],
            prompt.scope.namespace,
            variant=prompt.scope.variant,
            shared_tokens=prompt.scope.shared_tokens,
            order_s=-MAX_ORDER_S,  # it computes nothing, so no request has to wait for it
            keep=prompt.keep,
            features=carried(pull),
        )
        id_, result, end_s = request.request_id, None, now_s + wait_s + to.pull_s
        pulls.links.begin(id_, prompt.rank_id, to.rank_id, speed=to.exchange.speed, end_s=end_s)
        try:
            body = encode_begin(0, request)
            packed = await self._links.call(to.rank_id, "pull", body, within_s=left_s + CHECK_S)
            result = decode_result(packed)
        except (UnansweredError, *DECODE_ERRORS) as error:
            log.info("replica %s has not pulled a conversation's blocks: %s", to.rank_id, error)
        finally:
            # A refusal is no fault here: the source serves as many pulls as it can.
            is_refused = result is not None and result.reason == "refused"
            pulls.end(id_, None if is_refused else result, time.monotonic())
        return result


def _cost(to: Receiver, received: Counter[str]) -> tuple[bool, int]:
    """Return a key that is smallest for a rank with all blocks, else for the least loaded link."""
    return to.blocks > 0, received[to.rank_id] + to.blocks
