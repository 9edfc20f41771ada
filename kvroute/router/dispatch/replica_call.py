"""A call to one particular replica, which no other replica answers."""

import asyncio
from typing import Any

from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from kvroute.router.dispatch.plans import PLANS, DispatchPlan


class UnansweredError(Exception):
    """The replica did not answer; the message is the reason."""


async def call_replica(
    method: DeploymentHandle, request: Any, replica_id: str, *, within_s: float
) -> Any:
    """The result of the replica's method. request: has a request_id. Raises UnansweredError."""
    PLANS[request.request_id] = plan = DispatchPlan([replica_id])
    response = method.remote(request)
    try:
        async with asyncio.timeout(within_s):
            result = await response
    except TimeoutError:
        response.cancel()
        raise UnansweredError(f"it is silent for {within_s:g} s") from None
    except (RayError, RayServeException) as error:
        raise UnansweredError(str(getattr(error, "cause", error))) from error
    if plan.chosen != replica_id:
        raise UnansweredError("it takes no requests now")
    return result
