"""Priority classes of requests, and the rules by which batch requests give way in engines.

Batch requests have a lane of their own in each engine:

1. A step that computes a prompt of another request computes no prompt of a batch request. In other
   steps, while other requests are in the engine, the prompts of batch requests get at most
   1/STEP_PARTS of the step's tokens. Otherwise they get the whole step.
2. A batch request is admitted only if no other request waits before it, and only if the lane has
   tokens left in this step. So while there are other requests, one batch prompt is computed at a
   time. If another request that waits lacks blocks, batch requests are preempted.
3. A batch request that has waited for BATCH_S is no longer in the lane.
"""

from typing import Literal

# interactive: a person waits for the answer. batch: the request gives way to all others.
Priority = Literal["interactive", "default", "batch"]
# A batch request that has waited for this many seconds becomes a normal request. Until then, an
# engine's queue sorts the request as if it had arrived this much later. People who wait for a batch
# are assumed to accept such a delay.
BATCH_S = 300.0
# Beside the answers of other requests, the prompts of batch requests get this part of a step's
# tokens: 512 of 8,192. In simulation, a share four times as large adds up to 150% to the p90 of
# other requests' time to the first token. With half of this share, the batch gets 2% less done.
STEP_PARTS = 16
PRIORITIES: tuple[Priority, ...] = ("interactive", "default", "batch")  # the most urgent first


def parse_priority(name: str) -> Priority | None:
    """Return the priority class with this name, or None."""
    return next((priority for priority in PRIORITIES if priority == name), None)


def less_urgent(first: Priority, second: Priority) -> Priority:
    """Return the less urgent of two priority classes."""
    return max(first, second, key=PRIORITIES.index)


def lane_tokens(step_tokens: int) -> int:
    """Return the most prompt tokens that batch requests get beside others' answers in a step.

    Args:
        step_tokens: the most tokens of a step.
    """
    return max(1, step_tokens // STEP_PARTS)
