"""The likelihood of some next tokens behind a query and each of several items.

vLLM's server has the route. Here each item is a prompt of a completion, so prompts go where the
query is cached.
"""

import math
import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from msgspec.json import encode
from msgspec.structs import replace
from pydantic import BaseModel, Field

from kvroute.contract.generation import TokenIds
from kvroute.router.api.calls import COMPLETIONS, MAX_CHOICES, Call, parse_call
from kvroute.router.api.errors import ApiError
from kvroute.router.api.parsing import BOM, json_object, parse
from kvroute.router.api.response_object import members
from kvroute.router.placement.receipts import RECEIPTS

SCORING = "/generative_scoring"
MOST_TOKENS = 1 << 20  # of all prompts together; to write them takes a router's loop some 50 ms
KEPT = (  # fields of the body that the completion has too
    *("model", "cache_salt", "priority", "timeout", "user", "prefix_id", "task_id"),
    *("session_id", "session_end", "prompt_cache_retention", "prompt_cache_options"),
)
ASKED = {
    "max_tokens": 1,
    "temperature": 0,
    "logprobs": 1,
    "return_tokens_as_token_ids": True,
}

TokenId = Annotated[int, Field(ge=0, lt=2**32)]
Text = str | list[TokenId]


class Scoring(BaseModel):
    """The fields of a body that the completion does not have."""

    query: Text = Field(description="a text, or its token ids")
    items: list[str] | list[list[TokenId]] = Field(
        min_length=1,
        max_length=MAX_CHOICES,
        description=f"1 to {MAX_CHOICES} texts, or as many lists of token ids",
    )
    label_token_ids: list[TokenId] = Field(
        min_length=1, description="the token ids of which the likelihood is wanted"
    )
    apply_softmax: bool = Field(True, description="true or false")
    item_first: bool = Field(False, description="true or false")
    add_special_tokens: bool = Field(True, description="true or false")


def parse_scoring(raw: bytes) -> tuple[Scoring, bytes, str | None]:
    """Return the request, the body without a byte order mark, and the model's name in it.

    Raises:
        ApiError: 400, the body is no such request.
    """
    raw = raw.removeprefix(BOM)
    model = json_object(raw).get("model")
    return parse(Scoring, raw), raw, model if isinstance(model, str) else None


def completion(scoring: Scoring, raw: bytes, prompts: Sequence[TokenIds]) -> Call:
    """Return the completion whose log-probabilities are the scores; raw: the body.

    Raises:
        ApiError: one of the other fields is not what it should be, or these are too many tokens.
    """
    tokens = sum(map(len, prompts))
    if tokens > MOST_TOKENS:
        raise ApiError(
            413,
            f"the query before each item makes {tokens} tokens; the limit is {MOST_TOKENS}. Send "
            "fewer items at once",
            code="request_too_large",
        )
    given = members(raw)
    kept = {name: given[name] for name in KEPT if name in given}
    asked = {**ASKED, "logprob_token_ids": scoring.label_token_ids, "prompt": ""}
    call = parse_call(COMPLETIONS, encode({**kept, **asked}))
    call = replace(call, body={**call.body, "prompt": prompts})
    return call if len(prompts) > 1 else replace(call, raw=call.with_prompt(0))


def scores(scoring: Scoring, completed: Mapping[str, Any], *, id_: str) -> dict[str, Any]:
    """Return vLLM's response object for this completion; id_: of the request."""
    receipts = {RECEIPTS: completed[RECEIPTS]} if RECEIPTS in completed else {}
    return {
        "id": f"generative-scoring-{id_}",
        "object": "list",
        "created": int(time.time()),
        "model": completed["model"],
        "data": [
            {"index": choice["index"], "object": "score", "score": _score(scoring, choice)}
            for choice in completed["choices"]
        ],
        "usage": completed["usage"],
        **receipts,
    }


def _score(scoring: Scoring, choice: Mapping[str, Any]) -> float:
    """Return the likelihood of the first label: of all tokens, or of the labels alone."""
    (found,) = choice["logprobs"]["top_logprobs"]
    labels = dict.fromkeys(scoring.label_token_ids)
    logprobs = [found[f"token_id:{label}"] for label in labels]
    if not scoring.apply_softmax:
        return math.exp(logprobs[0])
    largest = max(logprobs)
    weights = [math.exp(each - largest) for each in logprobs]
    return weights[0] / sum(weights)
