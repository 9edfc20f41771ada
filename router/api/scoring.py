"""Generative scoring: how likely given tokens are to follow a prompt of a query and an item.

A request has one query and several items. vLLM's server has the same route. In kvroute, each item
becomes a prompt of a completion, so that prompts are routed to replicas that have the query cached.
"""

import math
import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from msgspec import Raw
from msgspec.json import decode, encode
from msgspec.structs import replace
from pydantic import BaseModel, Field

from kvroute.contract.generation import TokenIds
from kvroute.features import FIELDS
from kvroute.router.api.call_limits import MAX_CHOICES, check_copies
from kvroute.router.api.calls import COMPLETIONS, Call, parse_call
from kvroute.router.api.errors import ApiError
from kvroute.router.api.fair_lock import one_by_one
from kvroute.router.api.json_members import Members, members
from kvroute.router.api.parsing import BOM, json_object, parse
from kvroute.router.placement.receipts import RECEIPTS

SCORING = "/generative_scoring"
# Largest number of tokens of all prompts. Encoding them takes the router about 50 ms.
MAX_TOKENS = 1 << 20
# Fields of the body that are copied to the completion.
COPIED_FIELDS = (
    *("model", "cache_salt", "priority", "timeout", "user"),
    *("session_id", "session_end"),
    *FIELDS,
)
# Fields of the completion that make it return the log-probabilities of its first token.
OWN_FIELDS = {
    "max_tokens": 1,
    "temperature": 0,
    "logprobs": 1,
    "return_tokens_as_token_ids": True,
}

TokenId = Annotated[int, Field(ge=0, lt=2**32)]
Text = str | list[TokenId]


class Scoring(BaseModel):
    """The fields of a body that are not copied to the completion."""

    query: Text = Field(description="a text, or its token ids")
    items: list[str] | list[list[TokenId]] = Field(
        min_length=1,
        max_length=MAX_CHOICES,
        description=f"1 to {MAX_CHOICES} texts, or as many lists of token ids",
    )
    label_token_ids: list[TokenId] = Field(
        min_length=1, description="a list of the token ids whose likelihood is returned"
    )
    apply_softmax: bool = Field(True, description="true or false")
    # Whether each prompt is an item and then the query, instead of the query and then an item.
    item_first: bool = Field(False, description="true or false")
    add_special_tokens: bool = Field(True, description="true or false")


def parse_scoring(raw: bytes) -> tuple[Scoring, bytes, str | None]:
    """Parse the body of a scoring request.

    Returns:
        The request, the body without a byte order mark, and the name of the model if there is one.

    Raises:
        ApiError: 400: the body is not a scoring request.
    """
    raw = raw.removeprefix(BOM)
    model = json_object(raw).get("model")
    return parse(Scoring, raw), raw, model if isinstance(model, str) else None


def completion(scoring: Scoring, raw: bytes, prompts: Sequence[TokenIds]) -> Call:
    """Return the completion that computes the log-probabilities for the scores.

    Args:
        raw: the body of the scoring request.
        prompts: token ids of the query with each item.

    Raises:
        ApiError: a copied field is not valid, or the prompts have too many tokens.
    """
    tokens = sum(map(len, prompts))
    if tokens > MAX_TOKENS:
        raise ApiError(
            413,
            f"the query, repeated for each item, and the items have {tokens} tokens together; the "
            f"limit is {MAX_TOKENS}. Send fewer items at once",
            code="request_too_large",
        )
    given = members(raw)
    copied = {name: given[name] for name in COPIED_FIELDS if name in given}
    own = {**OWN_FIELDS, "logprob_token_ids": scoring.label_token_ids, "prompt": ""}
    call = parse_call(COMPLETIONS, encode({**copied, **own}))
    call = replace(call, body={**call.body, "prompt": prompts})
    check_copies(call.body, prompts=len(prompts), body_bytes=len(call.raw))
    # With several prompts, a body for each of them is made later, when they are rendered.
    return call if len(prompts) > 1 else replace(call, raw=next(call.with_each_prompt()))


async def scores(scoring: Scoring, completed: Members, *, id_: str) -> dict[str, Any]:
    """Return the response in vLLM's format.

    Args:
        completed: the response of the completion.
        id_: id of the request.
    """
    choices = map(decode, decode(completed["choices"], type=list[Raw]))
    receipts = {RECEIPTS: completed[RECEIPTS]} if RECEIPTS in completed else {}
    return {
        "id": f"generative-scoring-{id_}",
        "object": "list",
        "created": int(time.time()),
        "model": completed["model"],
        "data": [
            {"index": choice["index"], "object": "score", "score": _score(scoring, choice)}
            async for choice in one_by_one(choices)
        ],
        "usage": completed["usage"],
        **receipts,
    }


def _score(scoring: Scoring, choice: Mapping[str, Any]) -> float:
    """Return the probability of the first label.

    With softmax, the probabilities of all labels add up to 1. Without it, those of all tokens do.
    """
    (top_logprobs,) = choice["logprobs"]["top_logprobs"]
    labels = dict.fromkeys(scoring.label_token_ids)
    logprobs = [top_logprobs[f"token_id:{label}"] for label in labels]
    if not scoring.apply_softmax:
        return math.exp(logprobs[0])
    largest = max(logprobs)
    weights = [math.exp(logprob - largest) for logprob in logprobs]
    return weights[0] / sum(weights)
