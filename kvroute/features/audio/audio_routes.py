"""The HTTP routes whose body is a form with a recording."""

from functools import partial

from fastapi import APIRouter, Request, Response

from kvroute.features.audio import ROUTES
from kvroute.features.audio.recordings import Recordings
from kvroute.features.audio.transcribing import transcribe
from kvroute.features.gate import Entry
from kvroute.features.router_service import RouterServices
from kvroute.router.api.calls import Call
from kvroute.router.endpoints.openai_routes import Answers, answer
from kvroute.router.endpoints.signs_of_life import SignsOfLife
from kvroute.router.middleware.request_id import request_id

FIELDS = {"model", "user"}  # the fields of a form with a recording that a router uses


class AudioAnswers(Answers):
    """A route for recordings."""

    async def respond(self, request: Request, entry: Entry, signs: SignsOfLife) -> Response:
        services: RouterServices = request.app.state.services
        recordings = services.get(Recordings.name)
        assert isinstance(recordings, Recordings)
        recording = request.state.kept.enter_context(await recordings.read(request))
        body = {name: recording.fields[name] for name in FIELDS & recording.fields.keys()}
        call = Call(self.path, b"", body, features={Recordings.name: b""})
        generate = partial(transcribe, recording)
        return await answer(call, request, entry, id_=request_id(request), generate=generate)


routes = APIRouter()
routes.routes += [AudioAnswers(path).route() for path in ROUTES]
