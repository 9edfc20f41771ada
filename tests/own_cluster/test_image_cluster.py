"""A real cluster with a model that sees."""

import json
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from tests.support.bodies import CHATS, MESSAGES, RESPONSES, Body
from tests.support.engines import BLOCK
from tests.support.hits import hit_tokens
from tests.support.serving import Cluster, start_cluster
from tests.support.tiny_vision import image, picture, seeing_model
from tests.support.waiting import until

OPTIONS = (
    "--routers",
    "1",
    "--replicas",
    "2",
    "--max-model-len",
    "2048",
    "--kv-cache-memory-mb",
    "16",
    "--dtype",
    "float32",
)
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
    model = seeing_model("idefics3", tmp_path_factory.mktemp("seeing"))
    named = ("--model", str(model), "--served-model-name", "m")
    with start_cluster(*named, *OPTIONS, deadline_s=300) as cluster:
        yield cluster


def chat(*parts: Any) -> Body:
    question = {"type": "text", "text": "What is it? " * 20}
    return {"model": "m", "messages": message(TEXT, *parts, question)}


def message(*parts: Any) -> list[Any]:
    return [{"role": "user", "content": [*parts]}]


def posted(cluster: Cluster, path: str, body: Body) -> httpx.Response:
    limited = {"max_tokens": 4, "temperature": 0, **body}
    return httpx.post(f"{cluster.url}{path}", json=limited, timeout=120)


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
    first = await ask(cluster, {"model": "m", "messages": message(story)})
    second = await ask(cluster, {"model": "m", "messages": message(story, image(picture(20)))})
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
        answer = posted(cluster, path, {"model": "m", **body})
        assert answer.status_code == 200, answer.text
        assert expected_in(answer) > asked.tokens / 2


async def test_what_is_no_image_costs_no_replica(cluster: Cluster) -> None:
    before = pids_of(cluster)
    for url in ("data:image/png;base64,aGVsbG8=", "http://127.0.0.1:1/a.png", "file:///a", "x"):
        answer = posted(cluster, CHATS, chat(image(url)))
        assert 400 <= answer.status_code < 500, answer.text
    assert pids_of(cluster) == before


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
    text = [choice["delta"].get("content") or "" for each in events for choice in each["choices"]]
    return "".join(text), events[-1]["usage"]["completion_tokens"]


def pids_of(cluster: Cluster) -> dict[str, int]:
    replicas = httpx.get(f"{cluster.url}/v1/cluster", timeout=10).json()["replicas"]
    return {each["id"]: int(each["pid"]) for each in replicas}
