"""Error responses, in the format of the API that the client uses: OpenAI's or Anthropic's."""

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import msgspec
from starlette.responses import Response
from starlette.types import Scope

from kvroute.contract.error_codes import Code, FeatureCode, anthropic_type_of, code_of, type_of
from kvroute.store.connection import REDIS_ERRORS, refusal

ANTHROPIC = "/v1/messages"  # route whose errors have Anthropic's format
MODELS = "/v1/models"  # route of both APIs
ANTHROPIC_VERSION = "anthropic-version"  # header that Anthropic's clients send with each request
EVENTS = "text/event-stream"  # content type of streams
RESPONSES = "/v1/responses"  # route whose events have sequence numbers
DONE = b"data: [DONE]\n\n"  # end of streams of chats and completions
_NUMBER = re.compile(rb'"sequence_number":\s?(\d+)')  # in the JSON of an event
# Error codes after which clients should not retry, because the request would fail again.
FINAL = frozenset({"replicas_died", "request_blamed"})
JSON = "application/json"  # content type of error responses


@dataclass(eq=False)
class ApiError(Exception):
    """An error that ends the request with an error response. docs/errors.md lists all codes."""

    status: int
    message: str
    param: str | None = None  # name of the field to change
    # Name of the error for programs; None: the one of its status.
    code: Code | FeatureCode | None = None
    headers: Mapping[str, str] = field(default_factory=dict)  # further headers of the response

    def __post_init__(self) -> None:
        self.code = self.code or code_of(self.status)

    def __str__(self) -> str:
        return self.message

    def body(self) -> bytes:
        """Return the JSON body of an error response."""
        error = {
            "message": self.message,
            "type": type_of(self.status),
            "param": self.param,
            "code": self.code,
        }
        return msgspec.json.encode({"error": error})


def event(error: ApiError, before: bytes, *, path: str = "") -> bytes:
    """Return the event that reports an error at the end of a stream, in the route's format.

    Args:
        before: the last bytes that the client received. In the Responses API, the event's sequence
            number is one more than the last one in these bytes.
    """
    if path == ANTHROPIC:
        return b"event: error\ndata: " + _anthropic(error) + b"\n\n"
    if path == RESPONSES:
        return responses_event(error, last_number(before, otherwise=-1) + 1)
    return b"data: " + error.body() + b"\n\n" + DONE


def responses_event(error: ApiError, number: int) -> bytes:
    """Return the event that reports an error in a stream of the Responses API.

    Args:
        number: the event's sequence number.
    """
    told = {
        "type": "error",
        "code": error.code,
        "message": error.message,
        "param": error.param,
        "sequence_number": number,
    }
    return b"event: error\ndata: " + msgspec.json.encode(told) + b"\n\n"


def last_number(data: bytes, *, otherwise: int) -> int:
    """Return the last sequence number in some events of the Responses API.

    Args:
        otherwise: returned if there is none.
    """
    numbers = _NUMBER.findall(data)
    return int(numbers[-1]) if numbers else otherwise


def response(error: ApiError, *, path: str = "") -> Response:
    """Return the error response for a route.

    If the error is temporary, a header asks the client to retry after a second. If a retry would do
    harm, another header asks it not to retry.
    """
    headers = {"retry-after": "1"} if error.status in (429, 503) else {}
    if error.code in FINAL:
        headers["x-should-retry"] = "false"
    headers |= error.headers
    if headers.get("x-should-retry") == "false":
        headers.pop("retry-after", None)
    return Response(body_of(error, path=path), error.status, headers, media_type=JSON)


def path_of(scope: Scope) -> str:
    """Return the path of a request, for the format of its errors.

    Both APIs have the list of models. There, only a header tells which of them the client uses.
    """
    path: str = scope["path"]
    if path.startswith(MODELS) and ANTHROPIC_VERSION.encode() in dict(scope["headers"]):
        return ANTHROPIC
    return path


def body_of(error: ApiError, *, path: str) -> bytes:
    """Return the JSON body of an error response, in the format of the route's API."""
    return _anthropic(error) if path.startswith(ANTHROPIC) else error.body()


def _anthropic(error: ApiError) -> bytes:
    members = {"type": anthropic_type_of(error.status), "message": error.message}
    return msgspec.json.encode({"type": "error", "error": members})


def invalid(param: str | None, message: str) -> ApiError:
    """Return an error 400 for an invalid value of a field."""
    return ApiError(400, message, param=param, code="invalid_value")


def unsupported(param: str, message: str) -> ApiError:
    """Return an error 400 for an unsupported field that must not be ignored."""
    return ApiError(400, message, param=param, code="unsupported_parameter")


def context_length_exceeded(param: str, message: str) -> ApiError:
    return ApiError(400, message, param=param, code="context_length_exceeded")


def redis_away(error: Exception, param: str | None = None) -> ApiError:
    """Return an error 503 for a request that needs Redis while it is away, or refuses writes."""
    message = f"Redis is away ({error}); try again"
    if refused := refusal(error):
        state, remedy = refused
        message = f"Redis {state}, so nothing more can be stored; {remedy}"
    return ApiError(503, message, param=param)


@contextmanager
def needing_redis() -> Iterator[None]:
    """Run a block that needs Redis.

    Raises:
        ApiError: 503: Redis cannot be reached.
    """
    try:
        yield
    except REDIS_ERRORS as error:
        raise redis_away(error) from None


def shown(value: object, limit: int = 80) -> str:
    """Return the first `limit` characters of a value's JSON, to show the value in a message."""
    text = ""
    for piece in _pieces(value, limit):
        text += piece
        if len(text) > limit:
            return text[:limit] + "…"
    return text


def _pieces(value: object, limit: int) -> Iterator[str]:
    """Yield the value's JSON in pieces. A string is cut off after `limit` characters."""
    if isinstance(value, str):
        yield json.dumps(value[:limit], ensure_ascii=False)
    elif isinstance(value, list):
        yield "["
        for number, item in enumerate(value):
            yield ", " if number else ""
            yield from _pieces(item, limit)
        yield "]"
    elif isinstance(value, dict):
        yield "{"
        for number, (name, item) in enumerate(value.items()):
            yield ", " if number else ""
            yield from _pieces(name, limit)
            yield ": "
            yield from _pieces(item, limit)
        yield "}"
    else:
        yield json.dumps(value)
