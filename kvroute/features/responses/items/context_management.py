"""Compaction that the client leaves to the server: the field `context_management`.

If the prompt of a call has more tokens than the client's threshold, the router lets the model
summarize it first, and then answers the call from the summary. The item with the summary is the
first one of the response's output.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
from fastapi import Request, Response
from msgspec.structs import replace

from kvroute.features.responses.items.compaction import (
    COMPACT,
    ENDS,
    NOT_FOR_COMPACT,
    NumberedEvents,
    without_trigger,
)
from kvroute.features.responses.items.input_items import input_items, new_item, with_input
from kvroute.features.responses.response_items import DATA, OBJECT
from kvroute.router.api.calls import INPUT_TOKENS, RESPONSES, Call
from kvroute.router.api.errors import invalid, shown
from kvroute.router.api.json_members import Members, encode, members
from kvroute.router.endpoints.openai_routes import answer
from kvroute.router.middleware.request_id import request_id

FIELD = "context_management"
# Stands for a route: a call whose last item has the summary of all the others. No client can
# request it.
COMPACTED = f"{RESPONSES}#compacted"
MOST = "max_output_tokens"
# Without a threshold, a prompt is compacted above this share of the model's context. The rest is
# for the answer.
DEFAULT_SHARE = 0.75


def threshold_of(body: Mapping[str, Any], max_model_len: int) -> int | None:
    """Return from how many tokens on a prompt is compacted; None: it is not.

    Raises:
        ApiError: the field has an unknown form.
    """
    given = body.get(FIELD)
    if given is None or given == []:
        return None
    entry = given[0] if isinstance(given, list) and len(given) == 1 else None
    if not isinstance(entry, dict) or entry.get("type") != "compaction":
        raise invalid(
            FIELD,
            f"{FIELD} is {shown(given)}; expected a list such as "
            '[{"type": "compaction", "compact_threshold": 100000}]',
        )
    threshold = entry.get("compact_threshold")
    if threshold is None:
        return int(max_model_len * DEFAULT_SHARE)
    if type(threshold) is not int or threshold < 1:
        raise invalid(
            FIELD, f"compact_threshold is {shown(threshold)}; expected a number of tokens from 1 on"
        )
    return threshold


async def compacted(call: Call, request: Request, threshold: int) -> Call | Response | None:
    """Return the call with a summary of all of its input, if its prompt is too long.

    The summary has at most half as many tokens as the prompt, whatever limit the answer has.

    Returns:
        None if the prompt is short enough. If it cannot be counted or summarized, the error.
    """
    items = input_items(call)
    if without_trigger(items)[1]:
        return None
    left_out = {*NOT_FOR_COMPACT, MOST}
    raw = {k: raw for k, raw in members(call.raw).items() if k not in left_out}
    asked = replace(call, raw=encode(raw), body={k: call.body[k] for k in raw})
    counted = await _answered(asked, INPUT_TOKENS, request)
    if counted.status_code != 200:
        return counted
    tokens: int = msgspec.json.decode(counted.body)["input_tokens"]
    if tokens < threshold:
        return None
    limit = {MOST: max(1, tokens // 2)}
    asked = replace(asked, raw=encode({**raw, **limit}), body={**asked.body, **limit})
    made = await _answered(asked, COMPACT, request)
    if made.status_code != 200:
        return made
    item = msgspec.json.decode(made.body)["output"][-1]
    return replace(with_input(call, [*items, new_item(item)], **{FIELD: None}), path=COMPACTED)


async def _answered(call: Call, path: str, request: Request) -> Response:
    """Return the response to another call, which counts for the same request."""
    id_ = f"{request_id(request)}-{path.rpartition('/')[2]}"
    return await answer(replace(call, path=path), request, request.state.entry, id_=id_)


class Leading(NumberedEvents):
    """Puts the item with the summary before the output of a response."""

    def __init__(self, item: Mapping[str, Any]) -> None:
        super().__init__()
        self._item = item

    async def whole(self, response: Members) -> Members:
        output = msgspec.json.decode(response["output"], type=list[Any])
        return {**response, "output": msgspec.Raw(encode([self._item, *output]))}

    async def instead(self, event: bytes) -> list[bytes]:
        head, mark, body = event.partition(DATA)
        if not mark:
            return [event]
        told = members(body)
        if "output_index" in told:
            index = msgspec.json.decode(told["output_index"], type=int)
            told["output_index"] = msgspec.Raw(encode(index + 1))
        if event.startswith(ENDS):
            told[OBJECT] = msgspec.Raw(encode(await self.whole(members(told[OBJECT]))))
        return [self.numbered(head + mark + encode(told))]

    def begin(self) -> Iterator[bytes]:
        for kind in ("response.output_item.added", "response.output_item.done"):
            yield self.made(kind, output_index=0, item=self._item)
