"""HTTP routes of the live page: its files in `ui/`, and its stream of events."""

from functools import cache
from importlib.resources import files

import msgspec
from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse, RedirectResponse, StreamingResponse

from kvroute.features.page.live import State
from kvroute.features.page.router_page import RouterPage
from kvroute.features.router_service import RouterServices
from kvroute.router.api.errors import ApiError
from kvroute.router.endpoints.docs_routes import HEADERS
from kvroute.router.serving.models import Models, Served

PAGE = "index.html"
OFF = "the live page is off (--no-ui); start with --ui or KVROUTE_UI=1"
TYPES = {  # extension of a file -> its content type
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}

routes = APIRouter()


@routes.get("/")
async def root(models: Served) -> Response:
    """Redirect to the live page; if it is off, to the list of routes."""
    return RedirectResponse("ui" if _found(models, None) else "docs")


@routes.get("/ui")
async def index(models: Served) -> Response:
    """Return the live page."""
    return await file(PAGE, models)


@routes.get("/ui/{name}")
async def file(name: str, models: Served) -> Response:
    """Return a file of the live page."""
    _page(models, None)
    if name not in _files():
        raise ApiError(404, f"the live page has no file {name!r}; open /ui instead")
    return Response(_files()[name], headers=HEADERS, media_type=TYPES[name.rpartition(".")[2]])


@routes.get("/v1/cluster/live")
async def live(
    request: Request, models: Served, model: str | None = None, replica: str | None = None
) -> Response:
    """Return a stream of the live page's events for a model; without `model`, the first model.

    The events include the samples of the charts: those of `replica`, or those of the fleet if no
    replica is given. The samples are in the same response as all other events, so that they come
    from the same router. A separate request might reach another router.
    """
    page = _page(models, model)
    services: RouterServices = request.app.state.services

    def more() -> State:
        figures = msgspec.json.encode(services.figures())
        return {"history": page.recorder.encoded(replica), "services": figures}

    events = await page.live.listen(more)
    headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
    return StreamingResponse(events, headers=headers, media_type="text/event-stream")


@routes.get("/v1/cluster/history")
async def history(models: Served, model: str | None = None, replica: str | None = None) -> Response:
    """Return the last hour's chart samples of a replica, or of the fleet if none is given."""
    samples = _page(models, model).recorder.as_json(replica)
    return JSONResponse({"router": models.router_id} | samples)


def _page(models: Models, model: str | None) -> RouterPage:
    page = _found(models, model)
    if page is None:
        raise ApiError(404, OFF)
    return page


def _found(models: Models, model: str | None) -> RouterPage | None:
    """Return the page of a model; without `model`, of the first model. None: the page is off."""
    router = models.select(model) if model else models.first
    return next((side for side in router.features if isinstance(side, RouterPage)), None)


@cache
def _files() -> dict[str, bytes]:
    """Return the contents of the page's files by name."""
    return {
        file.name: file.read_bytes()
        for file in files("kvroute.features.page").joinpath("ui").iterdir()
        if file.name.rpartition(".")[2] in TYPES
    }
