"""The batch lane of vLLM's scheduler: which prompt tokens of batch requests a step computes.

The rules are in contract/priority.py. Before vLLM allocates blocks for a request, it asks how many
tokens the request may get in this step (Scheduler._reserve_prefill_lookahead). The lane may answer
with fewer tokens than vLLM would give. If the answer is 0, vLLM skips the request in this step. If
the request is a waiting one, vLLM also admits no request behind it in this step.

If another request waits for blocks while batch requests run, the lane preempts one of them in each
step. vLLM itself preempts only for requests that run.

If a version of vLLM no longer asks, the only effect left is the order: batch requests come last.
"""

import time
from collections.abc import Callable
from typing import Any

from vllm.v1.request import Request, RequestStatus

from kvroute.contract.priority import lane_tokens
from kvroute.replica.vllm_engine.core.priority import is_in_lane


class BatchLane:
    """The lane of one scheduler.

    Attributes:
        clock: returns seconds of the monotonic clock.
    """

    def __init__(self, scheduler: Any, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._scheduler = scheduler
        # Prompt tokens that this step may still compute for batch requests; None: no limit.
        self._tokens: int | None = None
        # The first waiting request after the latest step, if it is not in the lane.
        self._left: Request | None = None
        self._lacks_blocks = False  # whether that request waits for blocks

    def begin_step(self) -> None:
        """Let the lane's prompts come last among the running requests, and limit the lane."""
        running: list[Request] = self._scheduler.running
        now_s = self.clock()
        others = [request for request in running if not is_in_lane(request.priority, now_s)]
        first = self._first_waiting(now_s)
        self._tokens = None
        if others or first is not None:
            self._tokens = self._limit(others, first)
        if len(others) == len(running):
            return
        running.sort(key=lambda each: is_in_lane(each.priority, now_s) and is_prompt(each))
        if self._lacks_blocks and first is self._left and first is not None:
            self._preempt_last(now_s)

    def end_step(self, planned: Any) -> None:
        """Find out whether a waiting request that is not in the lane lacks blocks.

        Args:
            planned: vLLM's plan of the step.
        """
        scheduler = self._scheduler
        first = self._left = self._first_waiting(self.clock())
        self._lacks_blocks = (
            first is not None
            and first.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)
            and first.lora_request is None  # else it may wait for its adapter to be loaded
            and planned.total_num_scheduled_tokens < scheduler.max_num_scheduled_tokens
            and len(scheduler.running) < scheduler.max_num_active_reqs
        )

    def tokens(self, request: Request, computed: int, tokens: int) -> int:
        """Return how many tokens a request may get in this step; 0: it has to wait.

        Args:
            computed: the request's tokens that are computed, or were found in the cache.
            tokens: the tokens that vLLM would give to the request.
        """
        if self._tokens is None or gets_next_token(request, computed):
            return tokens
        if not is_in_lane(request.priority, self.clock()):
            return tokens
        allowed = tokens_within(self._tokens, tokens, self._scheduler)
        self._tokens -= allowed
        return allowed

    def _preempt_last(self, now_s: float) -> None:
        """Preempt the last batch request, if its blocks can be freed; admit none in this step."""
        scheduler = self._scheduler
        last = max(scheduler.running, key=lambda each: (each.priority, each.arrival_time))
        if not is_in_lane(last.priority, now_s) or not scheduler._request_blocks_can_be_freed(last):
            return
        self._tokens = 0
        scheduler.running.remove(last)
        scheduler._preempt_request(last, now_s, drop_stale_output=scheduler.requires_kv_delivery)

    def _limit(self, others: list[Request], first: Request | None) -> int:
        """Return the lane's tokens in this step; 0 if it computes prompts of other requests.

        Args:
            others: the running requests that are not in the lane.
            first: the first waiting request, if it is not in the lane. It is ignored if it already
                waited after the last step, since it then waits for blocks or something else.
        """
        if any(map(is_prompt, others)) or (first is not None and first is not self._left):
            return 0
        return lane_tokens(self._scheduler.max_num_scheduled_tokens)

    def _first_waiting(self, now_s: float) -> Request | None:
        """Return the first waiting request, if it is not in the lane."""
        waiting = self._scheduler.waiting
        first: Request | None = waiting.peek_request() if waiting else None
        if first is None or is_in_lane(first.priority, now_s):
            return None
        return first


def is_prompt(request: Request, computed: int | None = None) -> bool:
    """Return whether a step computes the request's prompt, and not only its next answer token."""
    computed = request.num_computed_tokens if computed is None else computed
    is_prompt: bool = computed < request.num_tokens - 1
    return is_prompt


def gets_next_token(request: Request, computed: int) -> bool:
    """Return whether a step computes only the next token of a running answer."""
    return request.status == RequestStatus.RUNNING and not is_prompt(request, computed)


def tokens_within(limit: int, tokens: int, scheduler: Any) -> int:
    """Return how many of a prompt's next tokens a step may compute that has this limit.

    With some models, a part may not end inside a block. The step then computes all or none of them.
    """
    if scheduler.need_mamba_block_aligned_split:
        return tokens if limit > 0 else 0
    return min(tokens, max(0, limit))
