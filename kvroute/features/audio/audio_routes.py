"""The HTTP routes whose body is a form with a recording.

No router knows the tokens of such a prompt, and models with an encoder cache no prefixes in vLLM.
So the replica is chosen by the loads only.
"""

import time
from functools import partial

import numpy as np
from fastapi import APIRouter, Request, Response
from msgspec.msgpack import encode
from msgspec.structs import replace

from kvroute.contract.generation import EngineDeadError
from kvroute.features.audio import ROUTES
from kvroute.features.audio.recordings import Recording, Recordings
from kvroute.features.gate import Entry
from kvroute.features.router_service import RouterServices
from kvroute.router.api.calls import Call
from kvroute.router.connections.links import HungError, Links, UnansweredError
from kvroute.router.endpoints.openai_routes import AnsweredRoute, answer
from kvroute.router.endpoints.signs_of_life import SignsOfLife
from kvroute.router.middleware.request_id import request_id
from kvroute.router.placement.attempts import RequestContext
from kvroute.router.serving.assembly import Parts
from kvroute.router.serving.rendering import http_call
from kvroute.router.serving.responding import written
from kvroute.wire.link import LostError, RefusedError

FIELDS = {"model", "user"}  # the fields of a form with a recording that a router uses
# Whisper computes a recording in clips of this many seconds. A shorter one takes as long.
CLIP_S = 30
METHOD = "upload"  # name of the method with which a replica gets a part of a form
PART_S = 60.0  # seconds for a replica to store a part


class AudioRoute(AnsweredRoute):
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
routes.routes += [AudioRoute(path).route() for path in ROUTES]


async def transcribe(
    recording: Recording, call: Call, context: RequestContext, parts: Parts
) -> Response:
    """Return the response to a call with a recording.

    In loads, limits and metrics, each second of the recording counts as one token of a prompt.
    The replicas' speed of prefill is learned in the same unit.

    Raises:
        ApiError: no replica answers.
    """
    parts.holding.check(context.urgency)
    seconds = -(-recording.seconds // CLIP_S) * CLIP_S
    context.entry.add_prompt_tokens(seconds, time.monotonic())
    http = replace(http_call(call, call.raw), upload=recording.upload)
    context = replace(
        context,
        ready_s=time.monotonic(),
        is_opaque=True,
        before_send=partial(upload, recording, parts.links),
    )
    starters = parts.dispatcher.starters([(np.zeros(seconds, np.uint32), http)], context)
    return await written(call, starters, prompts=1, policy=parts.settings.policy)


async def upload(recording: Recording, links: Links, rank_id: str) -> None:
    """Send a form to a rank. The next part is sent when the replica has stored the one before.

    Raises:
        LostError, HungError, EngineDeadError: the replica was lost.
        RefusedError: the replica has no space for the form, or is too busy.
    """
    offset = 0
    async for data in recording.parts():
        part = encode((recording.upload.id, offset, data))
        try:
            refusal = await links.call(rank_id, METHOD, part, within_s=PART_S)
        except UnansweredError as error:
            if isinstance(error.__cause__, LostError | HungError | EngineDeadError):
                raise error.__cause__ from error
            raise RefusedError(f"it has not stored a part of the body: {error}") from error
        if refusal:
            raise RefusedError(refusal.decode())
        offset += len(data)
