"""A container with the options of docs/operations/image.md serves, and ends its streams."""

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from openai import OpenAI

from kvroute.process.builtin_model import BUILTIN_MODEL
from tests.support.containers import Container, ContainerNetwork
from tests.support.documents import ROOT, steps, words
from tests.support.images import IMAGE
from tests.support.waiting import wait_until
from tests.support.workloads import ask, user

pytestmark = pytest.mark.timeout(1800)
PAGE = ROOT / "docs" / "operations" / "image.md"
PREPARES = "preparing SmolLM2"  # the first start on a new volume converts the model
READY = re.compile(r"^ *([\d.]+) s  replica", flags=re.MULTILINE)
GRACE_S = 60  # as the page says


def documented_options() -> list[str]:
    """Return the options of the page's `docker run`, but for the port, which is on the host."""
    (command,) = (step.text for step in steps(PAGE) if step.text.startswith("docker run"))
    given = [word for word in words(command)[2:-1] if word.strip()]
    port = given.index("--publish")
    # Docker makes no other places writable, and podman does by default.
    return [*given[:port], *given[port + 2 :], "--read-only-tmpfs=false"]


@pytest.fixture(scope="module")
def first(network: ContainerNetwork) -> Container:
    """The first container with the volume. A test stops it."""
    container = network.start(IMAGE, *documented_options())
    container.wait_for_health()
    return container


@pytest.fixture
def client(first: Container) -> Iterator[OpenAI]:
    with openai(first) as client:
        yield client


def openai(container: Container) -> OpenAI:
    return OpenAI(base_url=f"{container.url}/v1", api_key="none", max_retries=0, timeout=300)


def test_it_is_ready(first: Container) -> None:
    assert PREPARES in first.logs()
    wait_until(lambda: READY.search(first.logs()))  # printed after the first answer of /health
    print(f"ready after {READY.findall(first.logs())[-1]} s")


def test_it_runs_as_user_1000_and_cannot_change_its_root(first: Container) -> None:
    assert first.execute("id", "-u").stdout == "1000\n"
    for folder in ("/", "/opt/kvroute", "/etc", "/var/tmp"):
        assert first.execute("touch", f"{folder}/file").returncode != 0, folder
    for folder in ("/tmp", "/home/kvroute"):
        assert first.execute("touch", f"{folder}/file").returncode == 0, folder


def test_the_second_turn_of_a_chat_is_found_in_the_cache(client: OpenAI) -> None:
    messages = user("word " * 200)
    answer = ask(client, messages)
    assert answer.cached_tokens == 0
    messages += [{"role": "assistant", "content": answer.text}, *user("And now?")]
    assert ask(client, messages).cached_tokens >= 200


def test_it_obeys_a_json_schema(first: Container) -> None:
    """The engine's grammars work without Triton."""
    schema = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}}
    named = {"name": "city", "schema": {**schema, "required": ["city"]}, "strict": True}
    body = {
        "model": BUILTIN_MODEL,
        "messages": user("Name a city."),
        "response_format": {"type": "json_schema", "json_schema": named},
    }
    answer = httpx.post(f"{first.url}/v1/chat/completions", json=body, timeout=300).json()
    assert json.loads(answer["choices"][0]["message"]["content"])["city"] in ("Rome", "Oslo")


def test_a_stream_is_whole_when_the_container_is_stopped(
    first: Container, network: ContainerNetwork
) -> None:
    """SIGTERM comes while the stream runs. Then a new container with the volume goes on."""
    tokens = 300
    with openai(first) as client, ThreadPoolExecutor(1) as pool:
        file = client.files.create(file=("questions.jsonl", b"{}\n"), purpose="batch")
        stream = client.chat.completions.create(
            model=BUILTIN_MODEL,
            messages=[{"role": "user", "content": "Tell me a long story."}],
            max_tokens=tokens,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
        chunks = [next(stream) for _ in range(5)]
        stopped = pool.submit(first.stop, GRACE_S)
        chunks += stream
        assert stopped.result() == 0, first.logs()
    assert "stopping" in first.logs()
    reasons = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
    assert [reason for reason in reasons if reason] == ["length"]
    usage = chunks[-1].usage
    assert usage is not None
    assert usage.completion_tokens == tokens
    assert "Traceback" not in first.logs()

    second = network.start(IMAGE, *documented_options())
    second.wait_for_health()
    assert PREPARES not in second.logs()
    with openai(second) as client:
        assert client.files.content(file.id).content == b"{}\n"
        assert ask(client, user("Hello")).text
    assert second.stop(GRACE_S) == 0
