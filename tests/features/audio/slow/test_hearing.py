"""A real cluster with two models behind one endpoint: one hears, and one answers chats."""

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI

from tests.support.engines import shallow_model
from tests.support.serving import Cluster, start_cluster
from tests.support.tiny_audio import CLIP_S, POSITIONS, hearing_model, sound
from tests.support.waiting import wait_until

pytest.importorskip("soundfile", reason="vLLM reads recordings with the package soundfile")

HEARS, TALKS = "whisper", "m"
TRANSCRIPTIONS = "/v1/audio/transcriptions"
SOUND = sound(1)
LIMIT_MB = 2
LETTERS = 20  # at least as many letters has a text


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    models: list[dict[str, Any]] = [
        {
            "model": str(hearing_model(tmp_path_factory.mktemp("hearing"))),
            "served_model_name": HEARS,
            "replicas": 2,
            "max_model_len": POSITIONS,
            "kv_cache_memory_mb": 16,
        },
        {
            "model": str(shallow_model(tmp_path_factory.mktemp("talking") / "model")),
            "served_model_name": TALKS,
            "replicas": 1,
            "max_model_len": 1024,
        },
    ]
    options = ("--models", json.dumps(models), "--max-audio-mb", str(LIMIT_MB))
    with start_cluster(*options) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def client(cluster: Cluster) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


def posted(
    cluster: Cluster, file: bytes = SOUND, path: str = TRANSCRIPTIONS, **fields: str
) -> httpx.Response:
    data = {"model": HEARS, "language": "en", **fields}
    files = {"file": ("a.wav", file)}
    return httpx.post(f"{cluster.url}{path}", data=data, files=files, timeout=120)


def test_openais_client_gets_a_text(client: OpenAI) -> None:
    answers = [
        client.audio.transcriptions.create(model=HEARS, file=("a.wav", SOUND), language="en")
        for _ in range(4)
    ]
    assert len({answer.text for answer in answers}) == 1
    assert len(answers[0].text) >= LETTERS


def test_openais_client_gets_each_format(client: OpenAI) -> None:
    fields: dict[str, Any] = {"model": HEARS, "file": ("a.wav", SOUND), "language": "en"}
    verbose = client.audio.transcriptions.create(
        **fields, response_format="verbose_json", timestamp_granularities=["segment"]
    )
    assert (verbose.duration, verbose.language) == (1.0, "en")
    assert verbose.segments
    text = client.audio.transcriptions.create(**fields, response_format="text")
    assert json.loads(str(text))["text"]  # vLLM answers with JSON
    for name in ("srt", "vtt"):
        with pytest.raises(openai.BadRequestError, match="Currently only support"):
            client.audio.transcriptions.create(**fields, response_format=name)


def test_openais_client_streams_the_same_text(cluster: Cluster, client: OpenAI) -> None:
    fields: dict[str, Any] = {"model": HEARS, "file": ("a.wav", SOUND), "language": "en"}
    whole = client.audio.transcriptions.create(**fields)
    with client.audio.transcriptions.create(**fields, stream=True) as stream:
        events: list[Any] = [*stream]
    text = "".join(event.choices[0]["delta"]["content"] for event in events)
    assert text == whole.text
    assert len(events) > 1


@pytest.mark.filterwarnings("ignore:deprecated:DeprecationWarning")  # of the client's method
def test_openais_client_gets_a_translation(client: OpenAI) -> None:
    answer = client.audio.translations.create(model=HEARS, file=("a.wav", SOUND))
    assert answer.text


def test_a_prompt_reaches_the_model(cluster: Cluster) -> None:
    texts = {posted(cluster, prompt=prompt).json()["text"] for prompt in ("", "a cat", "a dog")}
    assert len(texts) == 3


def test_recordings_at_once_are_placed_on_both_replicas(cluster: Cluster) -> None:
    long = sound(2, seconds=10 * CLIP_S)
    with ThreadPoolExecutor(8) as pool:
        answers = [*pool.map(lambda _: posted(cluster, long), range(8))]
    assert {answer.status_code for answer in answers} == {200}
    assert len({answer.headers["x-kvroute-replica"] for answer in answers}) == 2
    assert len({answer.json()["text"] for answer in answers}) == 1


def test_a_recording_above_the_limit_is_refused_with_the_option(cluster: Cluster) -> None:
    answer = posted(cluster, bytes((LIMIT_MB << 20) + 1))
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (413, "request_too_large")
    assert "--max-audio-mb" in error["message"]
    assert str((LIMIT_MB << 20) + 1) in error["message"]


def test_a_model_that_does_not_hear_says_so(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="does not support"):
        client.audio.transcriptions.create(model=TALKS, file=("a.wav", SOUND))


def test_a_model_that_hears_answers_no_chats(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model=HEARS, messages=[{"role": "user", "content": "hi"}])


def test_errors_have_openais_form(cluster: Cluster) -> None:
    refused = {
        "language": posted(cluster, language="xx"),
        "file": posted(cluster, b"no recording"),
        "temperature": posted(cluster, temperature="hot"),
    }
    for name, answer in refused.items():
        error = answer.json()["error"]
        assert (answer.status_code, error["type"]) == (400, "invalid_request_error"), name
    assert refused["temperature"].json()["error"]["param"] == "temperature"
    unknown = posted(cluster, model="other")
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")


def test_an_answer_has_receipts(cluster: Cluster) -> None:
    url, headers = f"{cluster.url}{TRANSCRIPTIONS}", {"x-kvroute-receipt": "1"}
    answer = httpx.post(
        url, data={"model": HEARS}, files={"file": SOUND}, headers=headers, timeout=60
    )
    (receipt,) = answer.json()["kvroute_receipts"]
    assert receipt["replica"] == answer.headers["x-kvroute-replica"]
    assert receipt["expected_tokens"] == 0


def test_a_recording_is_transcribed_elsewhere_when_its_replica_dies(cluster: Cluster) -> None:
    """The last test here: a replica starts anew."""
    long = sound(3, seconds=25 * CLIP_S)
    undisturbed = posted(cluster, long).json()
    with ThreadPoolExecutor(6) as pool:
        asking = [pool.submit(posted, cluster, long) for _ in range(6)]
        busy = list[int]()

        def is_any_busy() -> bool:
            busy[:] = busy_replicas(cluster)
            return bool(busy)

        wait_until(is_any_busy)
        os.kill(busy[0], signal.SIGKILL)
        answers = [each.result() for each in asking]
    assert [answer.status_code for answer in answers] == [200] * 6
    assert all(answer.json() == undisturbed for answer in answers)


def busy_replicas(cluster: Cluster) -> list[int]:
    """Return the process ids of the replicas that run requests for the model that hears."""
    replicas = httpx.get(f"{cluster.url}/v1/cluster", timeout=10).json()["replicas"]
    return [int(each["pid"]) for each in replicas if each["model"] == HEARS and each["running"]]
