"""Transcribing: answers calls whose body is a form with a recording.

No router knows the tokens of such a prompt, and models with an encoder cache no prefixes in vLLM.
So the replica is chosen by the loads only.
"""

import time

import numpy as np
from fastapi import Response
from msgspec.structs import replace

from kvroute.router.api.calls import Call
from kvroute.router.forms.recordings import Recording
from kvroute.router.placement.attempts import RequestContext
from kvroute.router.serving.assembly import Parts
from kvroute.router.serving.rendering import http_call
from kvroute.router.serving.responding import written

# Whisper computes a recording in clips of this many seconds. A shorter one takes as long.
CLIP_S = 30


async def transcribe(call: Call, context: RequestContext, parts: Parts) -> Response:
    """Return the response to a call with a recording.

    In loads, limits and metrics, each second of the recording counts as one token of a prompt.
    The replicas' speed of prefill is learned in the same unit.

    Raises:
        ApiError: no replica answers.
        OverLimitError: the call would exceed a limit of its tenant.
    """
    recording = context.body
    assert isinstance(recording, Recording)
    parts.holding.check(context.urgency, context.sharer)
    seconds = -(-recording.seconds // CLIP_S) * CLIP_S
    if context.entry is not None:
        context.entry.add_prompt_tokens(seconds)
    http = replace(http_call(call, call.raw), upload=recording.upload)
    prompt = np.zeros(seconds, np.uint32)
    starts = parts.dispatcher.starts([(prompt, http)], replace(context, ready_s=time.monotonic()))
    return await written(call, starts, prompts=1, policy=parts.settings.policy)
