"""A real cluster with two models behind one endpoint: one sees, and one embeds."""

import json
import os
import signal
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from openai import NotFoundError, OpenAI

from tests.support.bodies import CHATS, MESSAGES, RESPONSES, Body
from tests.support.engines import BLOCK, WIDTH, shallow_model
from tests.support.hits import hit_tokens
from tests.support.serving import Cluster, start_cluster
from tests.support.tiny_vision import image, picture, seeing_model
from tests.support.waiting import until

SEES, EMBEDS = "m", "e"
EMBEDDINGS = "/v1/embeddings"
TEXT = {"type": "text", "text": "Somebody has taken a photograph of something. " * 10}
TEXT_TOKENS = 96  # at most, with the chat's marks
ANSWER = {"role": "assistant", "content": "A dog."}


@dataclass(frozen=True)
class Answer:
    replica: str
    expected: int  # prompt tokens
    cached: int
    tokens: int


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    models: list[dict[str, Any]] = [
        {
            "model": str(seeing_model("idefics3", tmp_path_factory.mktemp("seeing"))),
            "served_model_name": SEES,
            "replicas": 2,
            "max_model_len": 2048,
            "kv_cache_memory_mb": 16,
            "dtype": "float32",
        },
        {
            "model": str(shallow_model(tmp_path_factory.mktemp("embedding") / "model")),
            "served_model_name": EMBEDS,
            "replicas": 1,
            "max_model_len": 8192,
            "engine_args": {"runner": "pooling", "convert": "embed"},
        },
    ]
    with start_cluster("--models", json.dumps(models)) as cluster:
        yield cluster


def chat(*parts: Any) -> Body:
    question = {"type": "text", "text": "What is it? " * 20}
    return {"model": SEES, "messages": message(TEXT, *parts, question)}


def message(*parts: Any) -> list[Any]:
    return [{"role": "user", "content": [*parts]}]


def posted(cluster: Cluster, path: str, body: Body) -> httpx.Response:
    limited = {"max_tokens": 4, "temperature": 0, **body}
    return httpx.post(f"{cluster.url}{path}", json=limited, timeout=120)


def embedded(
    cluster: Cluster,
    text: str | list[int],
    path: str = EMBEDDINGS,
    model: str = EMBEDS,
    headers: Mapping[str, str] | None = None,
) -> httpx.Response:
    body = {"model": model, "input": text}
    return httpx.post(f"{cluster.url}{path}", json=body, headers=headers, timeout=60)


async def ask(cluster: Cluster, body: Body) -> Answer:
    """Returns when the router knows that the prompt is cached."""
    answer = posted(cluster, CHATS, body)
    assert answer.status_code == 200, answer.text
    usage = answer.json()["usage"]
    found = Answer(
        answer.headers["x-kvroute-replica"],
        expected_in(answer),
        (usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0,
        usage["prompt_tokens"],
    )
    await until(lambda: hit_tokens(cluster, **body) == whole_blocks(found.tokens - 1))
    return found


def expected_in(answer: httpx.Response) -> int:
    return int(answer.headers["x-kvroute-expected-tokens"])


def whole_blocks(tokens: int) -> int:
    return tokens // BLOCK * BLOCK


async def test_a_chat_with_the_same_image_goes_where_it_is_cached(cluster: Cluster) -> None:
    body = chat(image(picture(1)))
    first = await ask(cluster, body)
    assert first.cached == 0
    for _ in range(4):
        again = await ask(cluster, body)
        assert again.replica == first.replica
        assert again.expected == again.cached == whole_blocks(again.tokens - 1)


async def test_a_chat_with_an_image_finds_the_text_before_it(cluster: Cluster) -> None:
    """The router renders the first chat, and a replica the second."""
    story = {"type": "text", "text": "A story that goes on and on. " * 20}
    first = await ask(cluster, {"model": SEES, "messages": message(story)})
    second = await ask(cluster, {"model": SEES, "messages": message(story, image(picture(20)))})
    assert second.replica == first.replica
    assert second.expected == second.cached == whole_blocks(first.tokens - 1)


async def test_of_another_image_nothing_is_expected(cluster: Cluster) -> None:
    await ask(cluster, chat(image(picture(2))))
    for seed in (3, 4):
        other = await ask(cluster, chat(image(picture(seed))))
        assert other.expected == other.cached <= TEXT_TOKENS


async def test_a_chat_stays_where_its_images_are(cluster: Cluster) -> None:
    body = chat(image(picture(5)))
    first = await ask(cluster, body)
    for seed in (6, 7, 8):
        messages = [*body["messages"], ANSWER, *chat(image(picture(seed)))["messages"]]
        before, body = body, {**body, "messages": messages}
        turn = await ask(cluster, body)
        assert turn.replica == first.replica
        assert turn.expected == turn.cached > whole_blocks(len(before["messages"]) * 100)


async def test_every_api_finds_the_same_image(cluster: Cluster) -> None:
    url = picture(9)
    asked = await ask(cluster, chat(image(url)))
    data = {"type": "base64", "media_type": "image/png", "data": url.partition(",")[2]}
    question = {"type": "input_text", "text": TEXT["text"]}
    bodies: dict[str, Body] = {
        MESSAGES: {"messages": message(TEXT, {"type": "image", "source": data})},
        RESPONSES: {"input": message(question, {"type": "input_image", "image_url": url})},
    }
    for path, body in bodies.items():
        answer = posted(cluster, path, {"model": SEES, **body})
        assert answer.status_code == 200, answer.text
        assert expected_in(answer) > asked.tokens / 2


async def test_what_is_no_image_costs_no_replica(cluster: Cluster) -> None:
    before = pids_of(cluster)
    for url in ("data:image/png;base64,aGVsbG8=", "http://127.0.0.1:1/a.png", "file:///a", "x"):
        answer = posted(cluster, CHATS, chat(image(url)))
        assert 400 <= answer.status_code < 500, answer.text
    assert pids_of(cluster) == before


def test_openais_client_gets_embeddings_and_no_chats_of_that_model(cluster: Cluster) -> None:
    messages: Any = message({"type": "text", "text": "hi"})
    with OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        answer = client.embeddings.create(model=EMBEDS, input=["hi", "ho"])
        assert [len(each.embedding) for each in answer.data] == [WIDTH, WIDTH]
        assert answer.usage.prompt_tokens == 2
        with pytest.raises(NotFoundError):
            client.chat.completions.create(model=EMBEDS, messages=messages)


def test_an_embedding_has_the_id_of_its_request(cluster: Cluster) -> None:
    headers = {"x-request-id": "mine"}
    assert embedded(cluster, "hi", headers=headers).json()["id"] == "embd-mine"


def test_a_text_to_embed_may_have_many_token_ids(cluster: Cluster) -> None:
    assert embedded(cluster, [1] * 5000).json()["usage"]["prompt_tokens"] == 5000


def test_a_model_that_sees_embeds_nothing_and_one_that_embeds_classifies_nothing(
    cluster: Cluster,
) -> None:
    streamed = {**chat(), "model": EMBEDS, "stream": True}
    assert posted(cluster, CHATS, streamed).status_code == 404
    for path, model in (("/classify", EMBEDS), (EMBEDDINGS, SEES)):
        assert embedded(cluster, "hi", path, model).status_code == 404


def test_an_answer_about_an_image_goes_on_when_its_replica_dies(cluster: Cluster) -> None:
    """The last test here: a replica starts anew."""
    options = {"max_tokens": 800, "ignore_eos": True, "stream_options": {"include_usage": True}}
    body = {**chat(image(picture(30))), **options, "temperature": 0, "stream": True}
    undisturbed = recited(cluster, body, killed_after=0)
    assert undisturbed[1] == 800
    assert recited(cluster, body, killed_after=20) == undisturbed


def recited(cluster: Cluster, body: Body, *, killed_after: int) -> tuple[str, int]:
    """The text and its tokens; killed_after: events until its replica is killed; 0: it is not."""
    events: list[Any] = []
    with httpx.stream("POST", f"{cluster.url}{CHATS}", json=body, timeout=120) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                events.append(json.loads(line.removeprefix("data: ")))
            if line and len(events) == killed_after:
                os.kill(pids_of(cluster)[answer.headers["x-kvroute-replica"]], signal.SIGKILL)
                killed_after = -1
    text = [choice["delta"].get("content") or "" for event in events for choice in event["choices"]]
    return "".join(text), events[-1]["usage"]["completion_tokens"]


def pids_of(cluster: Cluster) -> dict[str, int]:
    replicas = httpx.get(f"{cluster.url}/v1/cluster", timeout=10).json()["replicas"]
    return {replica["id"]: int(replica["pid"]) for replica in replicas}
