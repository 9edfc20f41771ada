"""Errors that a client gets have the shape of the API that it uses: OpenAI's or Anthropic's."""

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import msgspec
from redis.exceptions import RedisError
from starlette.responses import Response

ANTHROPIC = "/v1/messages"  # its errors have Anthropic's shape
ANTHROPIC_TYPES = {  # by status
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    415: "invalid_request_error",
    429: "rate_limit_error",
    503: "overloaded_error",
}
EVENTS = "text/event-stream"  # the content type of streams
RESPONSES = "/v1/responses"  # errors in its streams are events with a name and a number
DONE = b"data: [DONE]\n\n"  # the end of streams of chats and completions
MOST_MESSAGE = 1500  # characters of a replica's message; vLLM's quote the client's whole value
_NUMBER = re.compile(rb'"sequence_number":\s?(\d+)')
FINAL = frozenset(
    {"replicas_died", "request_blamed"}
)  # codes of errors that a retry would only repeat


@dataclass(eq=False)
class ApiError(Exception):
    """Ends a request with `status`. `param` is the field to change; `code` is for programs.
    headers: of the response, besides the usual ones."""

    status: int
    message: str
    type: str = "invalid_request_error"
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.message

    def body(self) -> bytes:
        """The JSON body of an error response."""
        error = {
            "message": self.message,
            "type": self.type,
            "param": self.param,
            "code": self.code,
        }
        return msgspec.json.encode({"error": error})


def event(error: ApiError, before: bytes, *, path: str = "") -> bytes:
    """Return the end of a stream that fails after its first byte, as the route's API has it.

    Args:
        before: what the client got last, of which a Responses stream's numbers go on.
    """
    if path == ANTHROPIC:
        return b"event: error\ndata: " + _anthropic(error) + b"\n\n"
    if path == RESPONSES:
        return b"event: error\ndata: " + _of_responses(error, before) + b"\n\n"
    return b"data: " + error.body() + b"\n\n" + DONE


def _of_responses(error: ApiError, before: bytes) -> bytes:
    """Return OpenAI's ResponseErrorEvent."""
    numbers = _NUMBER.findall(before)
    return msgspec.json.encode(
        {
            "type": "error",
            "code": error.code or error.type,
            "message": error.message,
            "param": error.param,
            "sequence_number": int(numbers[-1]) + 1 if numbers else 0,
        }
    )


def response(error: ApiError, *, path: str = "") -> Response:
    """What the client of a route gets. It may come again in a second where the error passes by
    itself; its library is told not to retry where that would do harm."""
    headers = {"retry-after": "1"} if error.status in (429, 503) else {}
    if error.code in FINAL:
        headers["x-should-retry"] = "false"
    headers |= error.headers
    if headers.get("x-should-retry") == "false":
        headers.pop("retry-after", None)
    body = _anthropic(error) if path.startswith(ANTHROPIC) else error.body()
    return Response(body, error.status, headers, media_type="application/json")


def _anthropic(error: ApiError) -> bytes:
    kind = ANTHROPIC_TYPES.get(error.status, "api_error")
    return msgspec.json.encode({"type": "error", "error": {"type": kind, "message": error.message}})


def event_of_refusal(body: bytes, status: int, *, path: str) -> bytes:
    """Return the end of a stream that has only its head, from the body of an error response."""
    try:
        found = msgspec.json.decode(body)["error"]
        message, kind = str(found["message"]), str(found["type"])
        error = ApiError(status, message, kind, found.get("param"), found.get("code"))
    except (msgspec.DecodeError, LookupError, TypeError):
        error = ApiError(status, body.decode(errors="replace"))
    return event(error, b"", path=path)


def refusal_of_replica(data: bytes, status: int, *, path: str) -> bytes:
    """Return the body of an error that a replica found, as the route's API has it.

    vLLM's application gives errors of /v1/messages types of its own, such as BadRequestError. A
    path that it does not have for this model is `{"detail": "Not Found"}` there.
    """
    try:
        found = msgspec.json.decode(data)
    except msgspec.DecodeError:
        return data
    match found:
        case {"detail": detail}:
            error = ApiError(status, f"this model does not answer {path}: {detail}")
            return _anthropic(error) if path.startswith(ANTHROPIC) else error.body()
        case {"error": {"message": message}} if path.startswith(ANTHROPIC):
            return _anthropic(ApiError(status, _shortened(str(message))))
        case {"error": {"message": str(message)}} if len(message) > MOST_MESSAGE:
            found["error"]["message"] = _shortened(message)
            return msgspec.json.encode(found)
    return data


def _shortened(message: str) -> str:
    """Return a message without the middle of a long value that it quotes."""
    if len(message) <= MOST_MESSAGE:
        return message
    half = MOST_MESSAGE // 2
    return f"{message[:half]} … {message[-half:]}"


def invalid(param: str | None, message: str) -> ApiError:
    """A 400 for an invalid value of one field."""
    return ApiError(400, message, param=param, code="invalid_value")


def unsupported(param: str, message: str) -> ApiError:
    """A 400 for a known field that is not supported: ignoring it would change the response."""
    return ApiError(400, message, param=param, code="unsupported_parameter")


def context_length_exceeded(param: str, message: str) -> ApiError:
    return ApiError(400, message, param=param, code="context_length_exceeded")


def redis_away(error: Exception, param: str | None = None) -> ApiError:
    """A 503 for a request that needs Redis."""
    message = f"Redis is away ({error}); try again"
    return ApiError(503, message, type="server_error", param=param)


@contextmanager
def needing_redis() -> Iterator[None]:
    """Makes the block raise ApiError when Redis is away."""
    try:
        yield
    except (RedisError, OSError) as error:
        raise redis_away(error) from None


def shown(value: object, limit: int = 80) -> str:
    """A JSON value as a message quotes it; a long one is cut, and only the quoted part is read."""
    text = ""
    for piece in _pieces(value, limit):
        text += piece
        if len(text) > limit:
            return text[:limit] + "…"
    return text


def _pieces(value: object, limit: int) -> Iterator[str]:
    """The value's JSON in pieces; of a string, only what may be shown."""
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
