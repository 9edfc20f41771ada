"""Counts requests in the limits of their tenants, from their start to their end."""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from fastapi import Request, Response

from kvroute.keys.limits import TenantLimits
from kvroute.router.admission.limits import Entry, Limits, OverLimitError
from kvroute.router.api.errors import FINAL, ApiError
from kvroute.router.middleware.access import caller_of
from kvroute.router.middleware.limit_headers import over_limit, rate_headers
from kvroute.router.serving.models import Models

NO_LIMITS = nullcontext()  # for requests that do not have to be counted
NOT_COMPUTED = (429, 503)  # statuses of requests for which nothing was computed


def limits_of(request: Request) -> TenantLimits | None:
    """Return the limits of the request's tenant; None if it has no limits."""
    caller = caller_of(request)
    keys = request.app.state.keys
    return keys.limits(caller.tenant) if caller and keys else None


def entered(request: Request) -> Entry | None:
    """Count the request as running until `leaving` ends; return None if it is not counted.

    Raises:
        ApiError: the tenant has reached its limit of requests.
    """
    limits: Limits | None = request.app.state.limits
    caller = caller_of(request) if limits else None
    if limits is None or caller is None:
        return None
    with counting_refusals(request, request.app.state.models):
        return limits.enter(caller.tenant, time.monotonic())


def add_headers(request: Request, entry: Entry | None, response: Response) -> None:
    """Add headers that show how much of the tenant's limits is left."""
    if entry is not None:
        limits: Limits = request.app.state.limits
        response.headers.update(rate_headers(limits.headroom(entry.tenant, time.monotonic())))


def leaving(entry: Entry | None) -> AbstractContextManager[None]:
    """Return a context manager that stops counting a request at its end.

    If the request was rejected, the charge for its tokens is refunded. If its client has
    disconnected, the charge stays, since a replica may have computed the tokens.
    """
    return _leaving(entry) if entry else NO_LIMITS


@contextmanager
def _leaving(entry: Entry) -> Iterator[None]:
    try:
        yield
    except ApiError as error:
        if error.status in NOT_COMPUTED and error.code not in FINAL:
            entry.refund(time.monotonic())
        raise
    finally:
        entry.leave()


@contextmanager
def counting_refusals(request: Request, models: Models) -> Iterator[None]:
    """Count an error that is raised in the block as a rejected request.

    An error that is raised before the request's model is known counts for the first model.
    """
    try:
        yield
    except OverLimitError as over:
        model = getattr(request.state, "model", models.first)
        model.telemetry.over_limit(over.tenant, over.limit)
        limits: Limits = request.app.state.limits
        error = over_limit(over, limits.headroom(over.tenant, time.monotonic()))
        model.telemetry.refused(error)
        raise error from None
    except Exception as error:
        getattr(request.state, "model", models.first).telemetry.refused(error)
        raise
