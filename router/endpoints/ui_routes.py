"""HTTP routes of the live page: its files in `ui/`, and its stream of events."""

from functools import cache
from importlib.resources import files

import msgspec
from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse, RedirectResponse, StreamingResponse

from kvroute.features.router_service import RouterServices
from kvroute.router.api.errors import ApiError
from kvroute.router.page.live import Live, State
from kvroute.router.page.recorder import Recorder
from kvroute.router.serving.model_router import ModelRouter
from kvroute.router.serving.models import Models, Served

PAGE = "index.html"
OFF = "the live page is off (--no-ui); start with --ui or KVROUTE_UI=1"
TYPES = {  # extension of a file -> its content type
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
HEADERS = {
    # The page shows text from clients. None of it may run as code or be sent to another server.
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}

routes = APIRouter()


@routes.get("/")
async def root(models: Served) -> Response:
    """Redirect to the live page; if it is off, to the list of routes."""
    return RedirectResponse("ui" if models.first.live else "docs")


@routes.get("/ui")
async def page(models: Served) -> Response:
    """Return the live page."""
    return await file(PAGE, models)


@routes.get("/ui/{name}")
async def file(name: str, models: Served) -> Response:
    """Return a file of the live page."""
    _live(models, None)
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
    recorder = _recorder(models, model)

    services: RouterServices = request.app.state.services

    def more() -> State:
        states = {name: msgspec.json.encode(state) for name, state in services.live().items()}
        return {"history": recorder.encoded(replica), **states}

    events = await _live(models, model).listen(more)
    headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
    return StreamingResponse(events, headers=headers, media_type="text/event-stream")


@routes.get("/v1/cluster/history")
async def history(models: Served, model: str | None = None, replica: str | None = None) -> Response:
    """Return the last hour's chart samples of a replica, or of the fleet if none is given."""
    samples = _recorder(models, model).as_json(replica)
    return JSONResponse({"router": models.router_id} | samples)


def _live(models: Models, model: str | None) -> Live:
    live = _selected(models, model).live
    if live is None:
        raise ApiError(404, OFF)
    return live


def _recorder(models: Models, model: str | None) -> Recorder:
    recorder = _selected(models, model).recorder
    if recorder is None:
        raise ApiError(404, OFF)
    return recorder


def _selected(models: Models, model: str | None) -> ModelRouter:
    return models.select(model) if model else models.first


@cache
def _files() -> dict[str, bytes]:
    """Return the contents of the page's files by name."""
    return {
        file.name: file.read_bytes()
        for file in files("kvroute.router").joinpath("ui").iterdir()
        if file.name.rpartition(".")[2] in TYPES
    }
