"""OpenAI's Batch API."""

from operator import attrgetter

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from kvroute.features.batches.batches import BatchBody, as_object
from kvroute.features.batches.records import BATCH_PREFIX
from kvroute.features.batches.service import Service, needing_store
from kvroute.router.api.bodies import BodyReader
from kvroute.router.endpoints.idempotency import new_id
from kvroute.router.endpoints.pages import page_of
from kvroute.router.middleware.caller_check import caller_of

BATCHES = "/v1/batches"
MAX_LISTED = 100  # the most batches in one page, as in OpenAI's API

routes = APIRouter()


@routes.post(BATCHES)
async def create_batch(request: Request, service: Service, bodies: BodyReader) -> Response:
    """Create a batch from an uploaded file. It runs in the background."""
    body = await bodies.parsed(BatchBody, request)
    with needing_store():
        batch = await service.batches.create(
            body, caller_of(request), new_id(request, BATCH_PREFIX)
        )
    return JSONResponse(as_object(batch))


@routes.get(BATCHES)
async def list_batches(request: Request, service: Service) -> Response:
    """Return the client's batches, the newest first."""
    with needing_store():
        batches = await service.batches.listed(caller_of(request).tenant)
    query = request.query_params
    page = page_of(batches, query, id_of=attrgetter("id"), default=20, most=MAX_LISTED)
    return JSONResponse(page.as_object([as_object(batch) for batch in page.items]))


@routes.get(f"{BATCHES}/{{batch_id}}")
async def get_batch(batch_id: str, request: Request, service: Service) -> Response:
    """Return a batch: its status, its counts, and the ids of the files with its results."""
    with needing_store():
        batch = await service.batches.get(batch_id, caller_of(request).tenant)
    return JSONResponse(as_object(batch))


@routes.post(f"{BATCHES}/{{batch_id}}/cancel")
async def cancel_batch(batch_id: str, request: Request, service: Service) -> Response:
    """Cancel a batch. The results so far are kept."""
    with needing_store():
        batch = await service.batches.cancel(batch_id, caller_of(request).tenant)
    return JSONResponse(as_object(batch))
