"""Error responses, in the format of the API that the client uses: OpenAI's or Anthropic's."""

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import msgspec
from redis.exceptions import RedisError
from starlette.responses import Response

ANTHROPIC = "/v1/messages"  # route whose errors have Anthropic's format
# HTTP status -> Anthropic's type of error.
ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    415: "invalid_request_error",
    429: "rate_limit_error",
    503: "overloaded_error",
}
EVENTS = "text/event-stream"  # content type of streams
RESPONSES = "/v1/responses"  # route whose events have sequence numbers
DONE = b"data: [DONE]\n\n"  # end of streams of chats and completions
# Longest error message of a replica, in characters. vLLM may quote a whole prompt in a message.
MAX_MESSAGE = 1500
_NUMBER = re.compile(rb'"sequence_number":\s?(\d+)')  # in the JSON of an event
# Error codes after which clients should not retry, because the request would fail again.
FINAL = frozenset({"replicas_died", "request_blamed"})


@dataclass(eq=False)
class ApiError(Exception):
    """An error that ends the request with an error response."""

    status: int
    message: str
    type: str = "invalid_request_error"
    param: str | None = None  # name of the field to change
    code: str | None = None  # name of the error for programs
    headers: Mapping[str, str] = field(default_factory=dict)  # further headers of the response

    def __str__(self) -> str:
        return self.message

    def body(self) -> bytes:
        """Return the JSON body of an error response."""
        error = {
            "message": self.message,
            "type": self.type,
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
        return b"event: error\ndata: " + _responses_event(error, before) + b"\n\n"
    return b"data: " + error.body() + b"\n\n" + DONE


def _responses_event(error: ApiError, before: bytes) -> bytes:
    """Return the JSON of an error event of the Responses API."""
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
    body = _anthropic(error) if path.startswith(ANTHROPIC) else error.body()
    return Response(body, error.status, headers, media_type="application/json")


def _anthropic(error: ApiError) -> bytes:
    kind = ANTHROPIC_TYPES.get(error.status, "api_error")
    return msgspec.json.encode({"type": "error", "error": {"type": kind, "message": error.message}})


def error_event(body: bytes, status: int, *, path: str) -> bytes:
    """Convert an error response to the first and only event of a stream.

    Args:
        body: the body of the error response.
        status: its HTTP status.
        path: the route, which decides the event's format.
    """
    try:
        members = msgspec.json.decode(body)["error"]
        message, kind = str(members["message"]), str(members["type"])
        error = ApiError(status, message, kind, members.get("param"), members.get("code"))
    except (msgspec.DecodeError, LookupError, TypeError):
        error = ApiError(status, body.decode(errors="replace"))
    return event(error, b"", path=path)


def replica_error(data: bytes, status: int, *, path: str) -> bytes:
    """Return the body of a replica's error response in the format of the route's API.

    On /v1/messages, vLLM's errors have types that Anthropic's API does not have, such as
    BadRequestError. On routes that the model does not support, vLLM's body is
    `{"detail": "Not Found"}`.
    """
    try:
        body = msgspec.json.decode(data)
    except msgspec.DecodeError:
        return data
    match body:
        case {"detail": detail}:
            error = ApiError(status, f"this model does not support {path}: {detail}")
            return _anthropic(error) if path.startswith(ANTHROPIC) else error.body()
        case {"error": {"message": message}} if path.startswith(ANTHROPIC):
            return _anthropic(ApiError(status, _shortened(str(message))))
        case {"error": {"message": str(message)}} if len(message) > MAX_MESSAGE:
            body["error"]["message"] = _shortened(message)
            return msgspec.json.encode(body)
    return data


def _shortened(message: str) -> str:
    """Return the message without its middle if it is longer than MAX_MESSAGE."""
    if len(message) <= MAX_MESSAGE:
        return message
    half = MAX_MESSAGE // 2
    return f"{message[:half]} … {message[-half:]}"


def invalid(param: str | None, message: str) -> ApiError:
    """Return an error 400 for an invalid value of a field."""
    return ApiError(400, message, param=param, code="invalid_value")


def unsupported(param: str, message: str) -> ApiError:
    """Return an error 400 for an unsupported field that must not be ignored."""
    return ApiError(400, message, param=param, code="unsupported_parameter")


def context_length_exceeded(param: str, message: str) -> ApiError:
    return ApiError(400, message, param=param, code="context_length_exceeded")


def redis_away(error: Exception, param: str | None = None) -> ApiError:
    """Return an error 503 for a request that needs Redis while Redis is away."""
    message = f"Redis is away ({error}); try again"
    return ApiError(503, message, type="server_error", param=param)


@contextmanager
def needing_redis() -> Iterator[None]:
    """Run a block that needs Redis.

    Raises:
        ApiError: 503: Redis cannot be reached.
    """
    try:
        yield
    except (RedisError, OSError) as error:
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
