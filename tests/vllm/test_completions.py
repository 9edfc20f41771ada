"""Completions with several prompts, echoes and odd but valid values have the right choices."""

import json
import math
from collections import defaultdict
from itertools import product
from typing import Any

import httpx
import pytest

from kvroute.process.builtin_model import BUILTIN_MODEL
from tests.support.serving import Cluster

Body = dict[str, Any]
TEXTS = ["One, two, three,", "A, B, C,", "Red, green,"]
IDS = [[1, 2, 3, 4, 5], [400, 401, 402], [9000, 9001]]
GREEDY = {"temperature": 1.0, "top_k": 1}  # in which vLLM allows several choices
# Fields with which only a replica can render the prompts, or has to.
RENDERED_BY_REPLICA: dict[str, Body] = {
    "without special tokens": {"add_special_tokens": False},
    "truncated, several choices": {"truncate_prompt_tokens": 3, "n": 2, **GREEDY},
    "echo and log-probabilities": {"echo": True, "logprobs": 1, "max_tokens": 1},
    "echo, log-probabilities, several choices": {"echo": True, "logprobs": 1, "n": 2, **GREEDY},
    "echo alone": {"echo": True, "logprobs": 1, "max_tokens": 0},
}
PROMPTS = {"texts": TEXTS, "token ids": IDS, "one": TEXTS[:1], "one of token ids": IDS[:1]}
# Fields and prompts that are tested together. A list with one prompt is much the same for all.
CASES = [
    *product(RENDERED_BY_REPLICA, ("texts", "token ids")),
    *product(["echo and log-probabilities"], ("one", "one of token ids")),
]


def complete(cluster: Cluster, **own: Any) -> Body:
    """Return the whole answer to a completion."""
    body = {"model": BUILTIN_MODEL, "temperature": 0, "max_tokens": 6, **own}
    answer = httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    found: Body = answer.json()
    return found


def streamed(cluster: Cluster, **own: Any) -> dict[int, str]:
    """Return the text of each choice of a streamed completion, by its index."""
    body = {"model": BUILTIN_MODEL, "temperature": 0, "max_tokens": 6, "stream": True, **own}
    answer = httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=60)
    texts: defaultdict[int, str] = defaultdict(str)
    assert answer.text.endswith("data: [DONE]\n\n"), answer.text
    for line in answer.text.removesuffix("data: [DONE]\n\n").splitlines():
        for choice in json.loads(line.removeprefix("data: "))["choices"] if line else ():
            texts[choice["index"]] += choice["text"]
    return dict(texts)


@pytest.mark.parametrize(("fields", "kind"), CASES)
def test_each_of_several_prompts_is_answered_as_if_it_came_alone(
    cluster: Cluster, fields: str, kind: str
) -> None:
    own: Body = RENDERED_BY_REPLICA[fields]
    prompts: Any = PROMPTS[kind]
    alone = [complete(cluster, prompt=prompt, **own) for prompt in prompts]
    whole = complete(cluster, prompt=prompts, **own)
    assert [choice["index"] for choice in whole["choices"]] == [*range(len(whole["choices"]))]
    expected = [choice["text"] for answer in alone for choice in answer["choices"]]
    assert [choice["text"] for choice in whole["choices"]] == expected
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert whole["usage"][name] == sum(answer["usage"][name] for answer in alone)
    assert streamed(cluster, prompt=prompts, **own) == dict(enumerate(expected))


def test_an_echo_of_token_ids_has_their_text_and_log_probabilities(cluster: Cluster) -> None:
    """lm-evaluation-harness scores answers in this way."""
    text = "The capital of France is Paris."
    ids = httpx.post(
        f"{cluster.url}/tokenize", json={"model": BUILTIN_MODEL, "prompt": text}, timeout=60
    ).json()["tokens"]
    (choice,) = complete(cluster, prompt=[ids], echo=True, logprobs=1, max_tokens=0)["choices"]
    assert choice["text"] == text
    assert "".join(choice["logprobs"]["tokens"]) == text
    assert len(choice["logprobs"]["token_logprobs"]) == len(ids)


def test_an_echo_behind_a_named_prefix_begins_with_the_prefix(cluster: Cluster) -> None:
    (choice,) = complete(cluster, prompt="May I?", task_id="1", echo=True, logprobs=1)["choices"]
    assert choice["text"].startswith("You are a careful lawyer.")
    assert "".join(choice["logprobs"]["tokens"]) == choice["text"]


@pytest.mark.parametrize("n", ["2", 2.0])
def test_counts_are_read_as_vllm_reads_them(cluster: Cluster, n: Any) -> None:
    answer = complete(cluster, prompt=TEXTS[:2], n=n, **GREEDY)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]


def test_a_number_beyond_any_float_is_the_same_error_for_one_prompt_and_for_several(
    cluster: Cluster,
) -> None:
    errors = []
    for prompt in ('"a"', '["a", "b"]'):
        body = f'{{"model": "{BUILTIN_MODEL}", "prompt": {prompt}, "temperature": 1e400}}'
        errors.append(httpx.post(f"{cluster.url}/v1/completions", content=body, timeout=60))
    assert {error.status_code for error in errors} == {400}
    assert errors[0].text == errors[1].text


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_json_with_a_byte_order_mark_and_deep_values_is_read(cluster: Cluster, path: str) -> None:
    deep = 0
    for _ in range(100):
        deep = [deep]  # type: ignore[assignment]
    body = {"model": BUILTIN_MODEL, "max_tokens": 2, "metadata": {"a": "b"}, "unknown": deep}
    body |= {"prompt": "a"} if path == "/v1/completions" else {"messages": [{"role": "user"}]}
    raw = b"\xef\xbb\xbf" + json.dumps(body).encode()
    answer = httpx.post(cluster.url + path, content=raw, timeout=60)
    assert answer.status_code == 200, answer.text


def test_a_batch_of_chats_is_answered_as_if_each_came_alone(cluster: Cluster) -> None:
    url = f"{cluster.url}/v1/chat/completions"
    chats = [[{"role": "user", "content": text}] for text in TEXTS]
    own = {"model": BUILTIN_MODEL, "temperature": 0, "max_tokens": 6, "logprobs": True}
    alone = [httpx.post(url, json={**own, "messages": chat}, timeout=60).json() for chat in chats]
    batch = httpx.post(f"{url}/batch", json={**own, "messages": chats}, timeout=60).json()
    expected = [answer["choices"][0]["message"]["content"] for answer in alone]
    assert [choice["message"]["content"] for choice in batch["choices"]] == expected
    assert [choice["index"] for choice in batch["choices"]] == [0, 1, 2]
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert batch["usage"][name] == sum(answer["usage"][name] for answer in alone)


def test_an_invocation_is_answered_by_the_route_of_its_body(cluster: Cluster) -> None:
    completion = {"model": BUILTIN_MODEL, "prompt": TEXTS[0], "temperature": 0, "max_tokens": 4}
    answer = httpx.post(f"{cluster.url}/invocations", json=completion, timeout=60).json()
    assert answer["choices"][0]["text"] == complete(cluster, **completion)["choices"][0]["text"]
    refusal = httpx.post(f"{cluster.url}/invocations", json={"input": "x"}, timeout=60)
    assert refusal.status_code == 400
    assert "Either prompt or prompt_embeds must" in refusal.json()["error"]["message"]


def test_a_score_is_the_likelihood_of_the_next_token(cluster: Cluster) -> None:
    labels = {"apply_softmax": False, "label_token_ids": [253, 28725]}
    asked = {"model": BUILTIN_MODEL, "query": "Paris is in", "items": [" France", "", " Asia"]}
    url = f"{cluster.url}/generative_scoring"
    scored = httpx.post(url, json={**asked, **labels}, timeout=60).json()
    for item, found in zip(asked["items"], scored["data"], strict=True):
        own = {"logprob_token_ids": [253], "logprobs": 1, "return_tokens_as_token_ids": True}
        alone = complete(cluster, prompt=f"Paris is in{item}", max_tokens=1, **own)
        logprob = alone["choices"][0]["logprobs"]["top_logprobs"][0]["token_id:253"]
        assert found["score"] == pytest.approx(math.exp(logprob), rel=1e-4)
    assert scored["usage"]["completion_tokens"] == 3
    first = httpx.post(url, json={**asked, **labels, "item_first": True}, timeout=60).json()
    assert [each["index"] for each in first["data"]] == [0, 1, 2]
    refusal = httpx.post(url, json={**asked, "label_token_ids": [999_999]}, timeout=60)
    assert refusal.status_code == 400
