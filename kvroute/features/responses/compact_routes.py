"""The HTTP route that compacts a conversation: it answers with the input that goes on with it."""

from functools import partial

from fastapi import APIRouter, Request, Response

from kvroute.features.gate import Entry
from kvroute.features.responses.items.compaction import COMPACT
from kvroute.router.api.bodies import Bodies
from kvroute.router.api.calls import parse_call
from kvroute.router.endpoints.openai_routes import AnsweredRoute, answer
from kvroute.router.endpoints.signs_of_life import SignsOfLife
from kvroute.router.middleware.request_id import request_id


class CompactAnswers(AnsweredRoute):
    """The route. Its response is no stream, whatever the body says."""

    async def respond(self, request: Request, entry: Entry, signs: SignsOfLife) -> Response:
        bodies: Bodies = request.app.state.bodies
        call = await bodies.read(partial(parse_call, self.path), request)
        return await answer(call, request, entry, id_=request_id(request))


routes = APIRouter()
routes.routes += [CompactAnswers(COMPACT).route()]
