"""HTTP routes for stored responses.

A response can only be read by the tenant and with the `cache_salt` of the request that created it.
"""

from collections.abc import Awaitable, Callable
from operator import itemgetter
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.responses import JSONResponse

from kvroute.features.responses.background.background_answers import (
    Background,
    as_response,
    events_of,
    starting_after,
)
from kvroute.features.responses.continuing import OPTION, Conversations
from kvroute.features.responses.response_items import listed
from kvroute.features.responses.router_responses import RouterResponses
from kvroute.features.responses.stores.leased_values import owner
from kvroute.router.api.calls import RESPONSES, parse_call
from kvroute.router.api.errors import ApiError, invalid, needing_redis, shown
from kvroute.router.endpoints.pages import in_order, page_of
from kvroute.router.endpoints.signs_of_life import keep_alive_s
from kvroute.router.middleware.caller_check import caller_of
from kvroute.router.serving.models import Models, Served

RESPONSE = RESPONSES + "/{response_id}"  # path of one stored response
TRUE = ("true", "1")  # values of the parameter `stream` that turn it on
MAX_LISTED = 100  # the most items in a page, as in OpenAI's API

T = TypeVar("T")


async def _salt(request: Request, salt: Annotated[str, Query(alias="cache_salt")] = "") -> str:
    """Return the salt of the stored responses that the request may read.

    It combines the secret of the client's tenant and the parameter `cache_salt`.
    """
    return owner(caller_of(request), salt)


Salt = Annotated[str, Depends(_salt)]

routes = APIRouter()


@routes.get(RESPONSE)
async def get_response(
    response_id: str, request: Request, models: Served, salt: Salt, background: Background
) -> Response:
    """Return a stored response, or the events of a background response."""
    query = request.query_params
    wants_events = query.get("stream", "").lower() in TRUE
    record = await background.find(response_id, salt) if background else None
    if background and record:
        if wants_events:
            number = starting_after(query.get("starting_after"))
            return events_of(background, record, number, every_s=keep_alive_s(request))
        return as_response(background, record)
    body = await _first(models, response_id, lambda store: store.responses.get(response_id, salt))
    if wants_events:
        raise invalid(
            "stream",
            "This response cannot be streamed because it was not created with background=true, or "
            "its events have expired; leave out `stream`",
        )
    return Response(body, media_type="application/json")


@routes.delete(RESPONSE)
async def delete_response(
    response_id: str, models: Served, salt: Salt, background: Background
) -> Response:
    """Delete a stored response. One that runs in the background is cancelled."""
    is_background = background is not None and await background.delete(response_id, salt)
    try:
        await _first(models, response_id, lambda store: store.responses.delete(response_id, salt))
    except ApiError as error:
        if not (is_background and error.status == 404):
            raise
    return JSONResponse({"id": response_id, "object": "response", "deleted": True})


@routes.get(f"{RESPONSE}/input_items")
async def list_input_items(
    response_id: str, request: Request, models: Served, salt: Salt, background: Background
) -> Response:
    """Return the input items of a response, including the earlier conversation."""
    try:
        items = await _first(
            models, response_id, lambda store: store.input_items(response_id, salt)
        )
    except ApiError as error:
        record = await background.find(response_id, salt) if background else None
        if error.status != 404 or not background or not record:
            raise
        caller, asked = (
            caller_of(request),
            parse_call(RESPONSES, bytes(background.body(record).request)),
        )
        unfinished = (await models.find(asked.model, caller)).feature(RouterResponses).unfinished
        items = await unfinished.input_items(record, caller) if unfinished else []
    return page(listed(items, response_id), request)


@routes.post(f"{RESPONSE}/cancel")
async def cancel_response(
    response_id: str, models: Served, salt: Salt, background: Background
) -> Response:
    """Cancel a response that runs in the background. One that has ended stays as it is."""
    if background and (record := await background.find(response_id, salt)):
        return as_response(background, await background.cancel(record))
    await _first(models, response_id, lambda store: store.responses.get(response_id, salt))
    raise invalid(
        "response_id",
        f"response {shown(response_id)} cannot be cancelled, since it has not run in the "
        "background; close the connection to end such a response",
    )


def page(items: list[dict[str, Any]], request: Request) -> Response:
    """Return the page that a request wants of some items, the oldest of which comes first."""
    query = request.query_params
    found = page_of(
        in_order(items, query), query, id_of=itemgetter("id"), default=20, most=MAX_LISTED
    )
    return JSONResponse(found.as_object(found.items))


def stores_of(models: Models) -> list[Conversations]:
    """Return the stored conversations of each model; an empty list: this server stores none."""
    sides = (model.feature(RouterResponses) for model in models.all)
    return [side.conversations for side in sides if side.conversations is not None]


async def _first(
    models: Models, id_: str, find: Callable[[Conversations], Awaitable[T | None]]
) -> T:
    """Return the first result of `find` among the models' stores.

    Raises:
        ApiError: the response is not stored, or Redis cannot be used.
    """
    stores = stores_of(models)
    for store in stores:
        with needing_redis():
            if result := await find(store):
                return result
    reason = (
        "it was not stored, has expired, was deleted or evicted, or has another cache_salt"
        if stores
        else f"this server does not store responses; start it with {OPTION}"
    )
    raise ApiError(404, f"Response with id {shown(id_)} not found: {reason}", code="not_found")
