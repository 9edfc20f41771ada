"""Completes the response objects of the Responses API, as the Open Responses specification demands.

vLLM leaves some required fields out, and sets others to null that must not be null. Clients with
strict types reject such an object.
"""

import time
from collections.abc import Sequence
from typing import Any

from vllm.entrypoints.openai.responses import streaming_events
from vllm.entrypoints.openai.responses.protocol import (
    ResponsesRequest,
    ResponsesResponse,
    ResponseTextConfig,
)

from kvroute.replica.vllm_engine.http.request_run import CURRENT

# The default of the field `text`.
TEXT = ResponseTextConfig.model_validate({"format": {"type": "text"}, "verbosity": "medium"})

vllm_from_request = ResponsesResponse.from_request


def from_request(request: ResponsesRequest, *args: Any, **options: Any) -> ResponsesResponse:
    """Return a complete response object, in place of vLLM's."""
    return complete(vllm_from_request(request, *args, **options), request)


def complete(response: ResponsesResponse, request: ResponsesRequest) -> ResponsesResponse:
    """Set the required fields that vLLM does not set, and return the response."""
    run = CURRENT.get()
    defaults = {"metadata": {}, "text": TEXT, "top_logprobs": 0}
    values = {name: value for name, value in defaults.items() if getattr(response, name) is None}
    values |= {
        "completed_at": int(time.time()) if response.status == "completed" else None,
        "error": None,
        "store": run is not None and run.call.is_stored,
        "safety_identifier": getattr(request, "safety_identifier", None),
        "prompt_cache_key": request.prompt_cache_key,
    }
    for name, value in values.items():
        setattr(response, name, value)
    return response


def with_bytes(logprobs: Sequence[Any]) -> list[Any]:
    """Return the log-probabilities for an event, with the bytes of each token.

    vLLM itself leaves out the bytes.
    """
    event = streaming_events.response_text_delta_event.Logprob
    return [event.model_validate(logprob.model_dump()) for logprob in logprobs]
