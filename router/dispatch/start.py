"""All prompts of one call start, or none of them."""

import asyncio
from collections.abc import Sequence
from itertools import islice
from operator import attrgetter

from kvroute.contract.generation import TokenIds
from kvroute.contract.http_call import HttpCall
from kvroute.router.dispatch.dispatcher import Dispatcher, Generation
from kvroute.router.placement.attempts import RequestContext

SHOWN_REPLICAS = 32  # in a header


async def begin_all(
    dispatcher: Dispatcher,
    prompts: Sequence[tuple[TokenIds, HttpCall]],
    context: RequestContext,
) -> list[Generation]:
    """Returns when each has its first chunk. ApiError when one cannot run."""
    if len(prompts) == 1:
        return [await dispatcher.begin(*prompts[0], context)]
    tasks: list[asyncio.Task[Generation]] = []
    try:
        for prompt, call in prompts:
            begin = dispatcher.begin_in_turn if tasks else dispatcher.begin
            tasks.append(asyncio.create_task(begin(prompt, call, context)))
        return await asyncio.gather(*tasks)
    except BaseException:  # one cannot run, or the client has disconnected
        for task in tasks:
            task.cancel()
        for begun in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(begun, Generation):
                begun.close()
        raise


def placement_headers(generations: Sequence[Generation]) -> dict[str, str]:
    """Which replicas serve the call's prompts, each once, the expected cache hits, in tokens, and
    the longest wait of a prompt in the router. Load balancers refuse a response whose headers take
    more than some kilobytes."""
    replicas = dict.fromkeys(generation.replica_id for generation in generations)
    longest = max((generation.wait for generation in generations), key=attrgetter("waited_s"))
    return {
        "x-kvroute-replica": ",".join(islice(replicas, SHOWN_REPLICAS)),
        "x-kvroute-expected-tokens": str(sum(g.expected_tokens for g in generations)),
        "x-kvroute-queued-s": f"{longest.waited_s:.3f}",
        "x-kvroute-queued-for": longest.reason,
    }
