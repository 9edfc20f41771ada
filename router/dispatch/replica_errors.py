"""Converts the errors of replicas to kvroute's format, types, codes and wording.

vLLM's errors have types and codes of its own, such as BadRequestError and 400. If a field has a
wrong type, vLLM's message is a list of Python dictionaries.
"""

import re

import msgspec

from kvroute.contract.error_codes import CODES
from kvroute.contract.unreadable import DECODE_ERRORS
from kvroute.router.api.errors import ApiError, body_of, event, shown
from kvroute.router.dispatch.validation_problems import HEAD, cause

# Longest error message of a replica, in characters. vLLM may quote a whole prompt in a message.
MAX_MESSAGE = 1500
TOO_LONG = "maximum context length"  # part of vLLM's messages about prompts that are too long
# Path -> the field with the prompt, which vLLM calls input_tokens.
PROMPTS = {"/v1/completions": "prompt", "/v1/responses": "input"}
PARAMETER = re.compile(r" \(parameter=[^()]*(?:\([^()]*\)[^()]*)*\)$")  # `param` says the same
# A message of vLLM that begins with the field of the body that is wrong.
NAMED = re.compile(
    "(n|seed|temperature|top_p|top_k|min_p|(?:presence|frequency|repetition)_penalty"
    "|(?:max|min)_tokens|(?:prompt_)?logprobs|bad_words) (?:must|cannot)"
)


def replica_error(data: bytes, status: int, *, path: str) -> bytes:
    """Return the body of a replica's error response in the format of the route's API."""
    return body_of(parsed_error(data, status, path=path), path=path)


def error_event(body: bytes, status: int, *, path: str) -> bytes:
    """Return the error event for an error response's body, in a stream without other events."""
    return event(parsed_error(body, status, path=path), b"", path=path)


def failure_event(data: bytes) -> bytes:
    """Convert the events with which vLLM ends the stream of a chat or completion that fails."""
    first, separator, others = data.partition(b"\n\n")
    body = first.removeprefix(b"data: ")
    error = replica_error(body, _status_in(body), path="")
    return b"data: " + error + separator + others


def _status_in(body: bytes) -> int:
    """Return the HTTP status in the body of an error of vLLM, which has it as its code."""
    try:
        code = msgspec.json.decode(body)["error"]["code"]
    except (*DECODE_ERRORS, LookupError, TypeError):
        return 500
    return code if isinstance(code, int) else 500


def parsed_error(data: bytes, status: int, *, path: str) -> ApiError:
    """Return the error in the body of an error response, whatever its format is.

    On routes that the model does not support, vLLM's body is `{"detail": "Not Found"}`.
    """
    try:
        body = msgspec.json.decode(data)
    except DECODE_ERRORS:
        body = data.decode(errors="replace")
    match body:
        case {"detail": str(detail)}:
            reason = "" if detail == "Not Found" else f": {detail}"
            return ApiError(status, f"this model does not support {path}{reason}")
        case {"error": {"message": str(message)} as error} | ({"message": str(message)} as error):
            return _converted(message, error.get("param"), error.get("code"), status, path)
        case {"error": str(message)}:
            return ApiError(status, _shortened(message))
    return ApiError(status, _shortened(body if isinstance(body, str) else shown(body, MAX_MESSAGE)))


def _converted(message: str, param: object, code: object, status: int, path: str) -> ApiError:
    """Return the error with a message, param and code of a replica."""
    known = next((known for known in CODES if known == code), None)
    if known is None and TOO_LONG in message:
        known = "context_length_exceeded"
    if HEAD.match(message):
        param, message = _summary(message)
    elif param is None and (begins := NAMED.match(message)):
        param = begins[1]
    name = _field(param) if isinstance(param, str) else None
    if name == "input_tokens":
        name = PROMPTS.get(path, "messages")
    return ApiError(status, _shortened(PARAMETER.sub("", message)), param=name, code=known)


def _summary(message: str) -> tuple[str | None, str]:
    """Return the field and a sentence for a list of problems; the list itself if it is unknown."""
    if (found := cause(message)) is None:
        return None, message
    name, sentence = found
    if name[:1].isdigit():  # vLLM has checked a part of a message without its place
        return "messages", f"the content of a message is not valid: {sentence}"
    return name, sentence


def _field(location: str) -> str:
    """Return the field at a location such as `body.tools.0.FunctionTool.name`, without classes."""
    names = location.removeprefix("body.").split(".")
    return ".".join(name for name in names if not name[:1].isupper())


def _shortened(text: str, limit: int = MAX_MESSAGE) -> str:
    """Return the text without its middle if it is longer than the limit."""
    if len(text) <= limit:
        return text
    return f"{text[: limit // 2]} … {text[-(limit // 2) :]}"
