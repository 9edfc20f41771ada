"""A scoring request becomes a completion, and the log-probabilities become the scores."""

import json
import math
from typing import Any

import numpy as np
import pytest
from msgspec.json import decode, encode

from kvroute.router.api.errors import ApiError
from kvroute.router.api.json_members import Members, members
from kvroute.router.api.scoring import MAX_TOKENS, Scoring, completion, parse_scoring, scores

BODY: dict[str, Any] = {"query": "Is it?", "items": ["a", "b"], "label_token_ids": [7, 5]}


def parsed(**own: Any) -> tuple[Scoring, bytes, str | None]:
    return parse_scoring(json.dumps({**BODY, **own}).encode())


def test_the_completion_has_the_prompts_and_the_fields_about_the_request() -> None:
    scoring, raw, model = parsed(model="m", cache_salt="s", stream=True, temperature=2, n=3)
    call = completion(scoring, raw, [np.array([1, 2], np.uint32), np.array([3], np.uint32)])
    assert model == "m"
    assert (call.model, call.cache_salt, call.n) == ("m", "s", 1)
    _, second = map(json.loads, call.with_each_prompt())
    assert second["prompt"] == [3]
    assert (second["max_tokens"], second["logprob_token_ids"]) == (1, [7, 5])
    assert "stream" not in second


def test_the_completion_of_one_item_has_its_prompt_in_the_body() -> None:
    scoring, raw, _ = parsed(items=["a"])
    call = completion(scoring, raw, [np.array([1, 2], np.uint32)])
    assert json.loads(call.raw)["prompt"] == [1, 2]


@pytest.mark.parametrize(
    ("field", "own"),
    [
        ("query", {"query": 3}),
        ("items", {"items": []}),
        ("items", {"items": ["a", 3]}),
        ("label_token_ids", {"label_token_ids": []}),
        ("label_token_ids.0", {"label_token_ids": [-1]}),
        ("apply_softmax", {"apply_softmax": "perhaps"}),
    ],
)
def test_an_invalid_request_is_refused_with_the_name_of_its_field(
    field: str, own: dict[str, Any]
) -> None:
    with pytest.raises(ApiError) as refused:
        parsed(**own)
    assert refused.value.status == 400
    assert (refused.value.param or "").startswith(field)


def test_fields_that_are_too_large_to_be_copied_for_each_item_are_refused() -> None:
    scoring, raw, _ = parsed(label_token_ids=[*range(10_000)])
    prompt = np.array([1, 2], np.uint32)
    completion(scoring, raw, [prompt])
    with pytest.raises(ApiError) as refused:
        completion(scoring, raw, [prompt] * 1024)
    assert refused.value.status == 413


def test_too_many_tokens_are_refused() -> None:
    scoring, raw, _ = parsed()
    half = np.zeros(MAX_TOKENS // 2 + 1, np.uint32)
    with pytest.raises(ApiError) as refused:
        completion(scoring, raw, [half, half])
    assert refused.value.status == 413


def completed(*logprobs: float) -> Members:
    """Return a completion with these log-probabilities of the tokens 7 and 5."""
    top = {"token_id:9": -0.1, "token_id:5": logprobs[1], "token_id:7": logprobs[0]}
    choice = {"index": 0, "logprobs": {"top_logprobs": [top]}}
    body = {"model": "m", "choices": [choice], "usage": {"prompt_tokens": 3}}
    return members(json.dumps(body).encode())


async def scored(scoring: Scoring, *logprobs: float) -> dict[str, Any]:
    response: dict[str, Any] = decode(encode(await scores(scoring, completed(*logprobs), id_="r")))
    return response


async def test_a_score_is_the_first_labels_likelihood() -> None:
    scoring, _, _ = parsed(apply_softmax=False)
    response = await scored(scoring, -1.0, -2.0)
    assert response["id"] == "generative-scoring-r"
    assert response["data"] == [
        {"index": 0, "object": "score", "score": pytest.approx(math.exp(-1))}
    ]
    assert response["usage"] == {"prompt_tokens": 3}


async def test_with_softmax_the_likelihoods_of_the_labels_add_up_to_one() -> None:
    scoring, _, _ = parsed()
    (score,) = (await scored(scoring, -1001.0, -1000.0))["data"]
    assert score["score"] == pytest.approx(1 / (1 + math.e))
