"""What the routes of the Responses API do with responses that run in the background."""

from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import Depends, Request, Response
from fastapi.responses import StreamingResponse

from kvroute.features.responses.background.background_responses import BackgroundResponses
from kvroute.features.responses.continuing import BACKGROUND, without_store
from kvroute.features.responses.stores.background_store import Record
from kvroute.router.api.calls import RESPONSES, Call
from kvroute.router.api.errors import (
    ApiError,
    invalid,
    last_number,
    redis_away,
    responses_event,
    shown,
)
from kvroute.router.api.json_members import encode
from kvroute.router.dispatch.relay import complete_response
from kvroute.router.endpoints.idempotency import new_id
from kvroute.router.endpoints.signs_of_life import keep_alive_s, with_signs_of_life
from kvroute.router.serving.model_router import ModelRouter
from kvroute.router.serving.rendering import RefusedCallError
from kvroute.store.connection import REDIS_ERRORS

RESPONSE_PREFIX = "resp_"  # beginning of a response's id


async def begin(call: Call, request: Request) -> Response:
    """Let a response run in the background, and return it as it is at the start.

    Raises:
        ApiError: the call cannot run in the background, or would be refused.
    """
    service = await _service(request)
    if service is None:
        raise without_store(BACKGROUND, True, f"leave {BACKGROUND} out")
    if call.body.get("store") is False:
        raise invalid("store", f"store is false, but {BACKGROUND} needs it to be true")
    model: ModelRouter = request.state.model
    try:
        await model.requests.check(call)
    except RefusedCallError as error:
        return complete_response(error.refusal, path=call.path)
    record = await service.create(call, request.headers, new_id(request, RESPONSE_PREFIX))
    if call.body.get("stream") is True:
        return events_of(service, record, -1, every_s=keep_alive_s(request))
    return as_response(service, record)


def as_response(service: BackgroundResponses, record: Record) -> Response:
    """Return the response object of a background response."""
    return Response(encode(service.shown(record)), media_type="application/json")


def events_of(
    service: BackgroundResponses, record: Record, number: int, *, every_s: float
) -> Response:
    """Return the events of a background response with a higher number, as a stream.

    Args:
        every_s: seconds between two signs of life.
    """
    events = with_signs_of_life(
        _with_error(service.stream(record, number), number),
        path=RESPONSES,
        every_s=every_s,
    )
    return StreamingResponse(events, media_type="text/event-stream")


def starting_after(text: str | None) -> int:
    """Return the number of the last event that a client has; -1 if it has none.

    Raises:
        ApiError: the parameter `starting_after` is not a number.
    """
    if text is None:
        return -1
    if not (text.isascii() and text.isdecimal() and len(text) <= 9):
        raise invalid(
            "starting_after",
            f"starting_after is {shown(text)}; expected the sequence_number of an event",
        )
    return int(text)


async def _with_error(events: AsyncIterator[bytes], number: int) -> AsyncIterator[bytes]:
    """Yield events. If they end too early, yield an event with the cause.

    This event has the number of the event before it, so that a client that asks for the events
    after it gets all that it does not have.

    Args:
        number: the number of the last event that the client has.
    """
    try:
        async for event in events:
            number = last_number(event, otherwise=number)
            yield event
    except REDIS_ERRORS as failure:
        error = redis_away(failure)
    except ApiError as failure:
        error = failure
    else:
        return
    yield responses_event(error, max(0, number))


async def _service(request: Request) -> BackgroundResponses | None:
    service: BackgroundResponses | None = request.app.state.services.get("responses")
    return service


Background = Annotated[BackgroundResponses | None, Depends(_service)]
