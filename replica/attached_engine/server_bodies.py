"""The body that a server gets, and what its response says about tokens."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from kvroute.contract.http_call import HttpCall

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
WITH_XARGS = (CHAT, COMPLETIONS)  # routes whose bodies have vllm_xargs in all versions of vLLM
REPORT_MODE = "kv_cache_report_mode"  # vLLM's option: "full" reports the blocks of a cache hit
REPORT_MARKS = (REPORT_MODE.encode(), b"\\u00")  # a body with the option has one of them

# Pieces of a server-sent event that carries a token of the answer. In JSON, quotation marks inside
# a text are escaped, so a text cannot contain these pieces. Events of other routes are like those
# of chats.
TOKEN_MARKS = {
    CHAT: b'"delta":{',
    COMPLETIONS: b'"text":"',
    MESSAGES: b'"type":"content_block_delta"',
    RESPONSES: b'.delta"',
}
ROLE_MARK = b'"delta":{"role":'  # the first event of a chat has no token
USAGE_MARK = b'"usage":{'
# Highest number of tokens that is believed if a server reports it: half of MAX_UNSENT of
# wire/server.py. An answer of which a router leaves more tokens than that unread ends in an error.
MAX_TOKENS = 2_000_000

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder().decode


class ServerUsage(NamedTuple):
    """The tokens of a request, as the server reports them. None: it has not reported them."""

    output_tokens: int | None = None
    cached_tokens: int | None = None  # prompt tokens from the cache
    prompt_tokens: int | None = None  # Anthropic's API leaves out the cached ones

    def updated(self, later: "ServerUsage") -> "ServerUsage":
        """Return the usage after a later report, which may lack what an earlier one has said."""
        return ServerUsage(
            *(new if new is not None else old for old, new in zip(self, later, strict=True))
        )


def forwarded(
    path: str, body: bytes, *, namespace: str, reports_hits: bool, returns_ids: bool = False
) -> bytes:
    """Return the body to send; it is the client's own, byte for byte, if nothing has to change.

    A stream is not asked for its usage if the client does not ask: the response would differ. The
    client's own wish for reports of cache hits is removed: a report looks like a further copy of a
    block, which would then still be expected after its eviction.

    Args:
        path: the route.
        body: the client's JSON.
        namespace: the cache salt; empty: everybody shares the blocks.
        reports_hits: whether the server is asked to report the blocks of a cache hit.
        returns_ids: whether the server is asked for token ids.
    """
    reports_hits = reports_hits and path in WITH_XARGS
    may_ask = any(mark in body for mark in REPORT_MARKS)
    if not (namespace or reports_hits or may_ask or returns_ids):
        return body
    fields = _decode(body)
    if not isinstance(fields, dict):
        return body
    changed = dict(fields)
    if namespace:
        changed["cache_salt"] = namespace
    if returns_ids:
        changed["return_token_ids"] = True
    own = {REPORT_MODE: "full"} if reports_hits else {}
    if own or REPORT_MODE in _object(fields.get("vllm_xargs")):
        given = _object(fields.get("vllm_xargs"))
        changed["vllm_xargs"] = {name: given[name] for name in given if name != REPORT_MODE} | own
    return body if changed == fields else _encode(changed)


def with_token_ids(path: str, body: bytes, token_ids: Sequence[int]) -> bytes:
    """Return a body whose prompt is these token ids: an opening and the client's prompt.

    Raises:
        ValueError: The route takes no token ids.
    """
    if path != COMPLETIONS:
        raise ValueError(
            f"a prefix by name works only on {COMPLETIONS} here, because vLLM runs without "
            "kvroute's changes; send the prefix as a part of the messages"
        )
    return _encode(_decode(body) | {"prompt": [*token_ids]})


def token_count(path: str, event: bytes) -> int:
    """Return how many tokens of the answer an event carries, 0 or 1.

    An event may carry several tokens; the usage at the end, if there is any, corrects the sum.
    """
    if TOKEN_MARKS.get(path, TOKEN_MARKS[CHAT]) not in event:
        return 0
    return 0 if path == CHAT and ROLE_MARK in event else 1


def usage_of_event(event: bytes) -> ServerUsage:
    """Return the usage in a server-sent event."""
    if USAGE_MARK not in event:
        return ServerUsage()
    data = b"".join(
        line.removeprefix(b"data:") for line in event.splitlines() if line.startswith(b"data:")
    )
    return usage_of_body(data)


def usage_of_body(data: bytes) -> ServerUsage:
    """Return the usage in a JSON object of any of the four APIs."""
    if b'"usage"' not in data:
        return ServerUsage()
    try:
        fields = _decode(data)
    except (msgspec.DecodeError, RecursionError):
        return ServerUsage()
    whole = _object(fields)
    places = (whole, _object(whole.get("response")), _object(whole.get("message")))
    usage = next(filter(None, (_object(place.get("usage")) for place in places)), {})
    details = _object(usage.get("prompt_tokens_details") or usage.get("input_tokens_details"))
    cached = details.get("cached_tokens", usage.get("cache_read_input_tokens"))
    output = usage.get("completion_tokens", usage.get("output_tokens"))
    return ServerUsage(_number(output), _number(cached), _number(usage.get("prompt_tokens")))


def _number(value: Any) -> int | None:
    """Return a number of tokens, within the limits of a plausible one."""
    return max(0, min(value, MAX_TOKENS)) if isinstance(value, int) else None


def _object(value: Any) -> dict[str, Any]:
    """Return a JSON object, or an empty one for any other value."""
    return value if isinstance(value, dict) else {}


def body_headers(call: HttpCall) -> Mapping[str, str]:
    """Return the headers that describe the body of a request."""
    if call.upload is None:
        return {"content-type": "application/json"}
    return {"content-type": call.upload.content_type, "content-length": str(call.upload.size)}
