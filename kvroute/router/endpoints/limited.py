"""A request enters its tenant's limits, and leaves them however it ends."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from fastapi import Request

from kvroute.keys.limits import TenantLimits
from kvroute.router.api.access import caller_of
from kvroute.router.api.errors import FINAL, ApiError
from kvroute.router.api.limit_headers import over_limit, rate_headers
from kvroute.router.routing.limits import Entry, Limits, OverLimitError
from kvroute.router.serving.models import Models

UNDONE = (429, 503)  # statuses of what was not computed


def limits_of(request: Request) -> TenantLimits | None:
    """What the request's tenant may take; None: all."""
    caller = caller_of(request)
    keys = request.app.state.keys
    return keys.limits(caller.tenant) if caller and keys else None


def entered(request: Request) -> Entry | None:
    """The request is under way until `leave`; None where nothing is counted. OverLimitError."""
    limits: Limits | None = request.app.state.limits
    caller = caller_of(request)
    return limits.enter(caller.tenant, time.monotonic()) if limits and caller else None


def headers_for(request: Request, entry: Entry | None) -> dict[str, str]:
    """Of the response to it."""
    if entry is None:
        return {}
    limits: Limits = request.app.state.limits
    return rate_headers(limits.room(entry.tenant, time.monotonic()))


@contextmanager
def leaving(entry: Entry | None) -> Iterator[None]:
    """The request has left at the end of the block. What was refused unanswered costs nothing; who
    goes away does not get back what may have been computed for him."""
    try:
        yield
    except ApiError as error:
        if entry and error.status in UNDONE and error.code not in FINAL:
            entry.give_back(time.monotonic())
        raise
    finally:
        if entry:
            entry.leave()


@contextmanager
def counting_refusals(request: Request, models: Models) -> Iterator[None]:
    """Counts an error that leaves the block, since the client gets it. An error that is raised
    before the model is known counts for the first model."""
    try:
        yield
    except OverLimitError as over:
        model = getattr(request.state, "model", models.first)
        model.over_limit(over.tenant, over.limit)
        limits: Limits = request.app.state.limits
        error = over_limit(over, limits.room(over.tenant, time.monotonic()))
        model.refused(error)
        raise error from None
    except Exception as error:
        getattr(request.state, "model", models.first).refused(error)
        raise
