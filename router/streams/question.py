"""A question to one particular replica, answered by that one or by nobody."""

import asyncio
from typing import Any

from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from router.streams.routes import ROUTES, Route


class UnansweredError(Exception):
    """It did not answer; the message says why."""


async def ask(method: DeploymentHandle, request: Any, replica_id: str, *, within_s: float) -> Any:
    """What the replica's method returns. request: has a request_id. Raises UnansweredError."""
    ROUTES[request.request_id] = route = Route([replica_id])
    response = method.remote(request)
    try:
        async with asyncio.timeout(within_s):
            answer = await response
    except TimeoutError:
        response.cancel()
        raise UnansweredError(f"it is silent for {within_s:g} s") from None
    except (RayError, RayServeException) as error:
        raise UnansweredError(str(getattr(error, "cause", error))) from error
    if route.chosen != replica_id:
        raise UnansweredError("it takes no requests now")
    return answer
