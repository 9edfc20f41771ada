"""How a batch's lines are sent: again if the cluster had no place, and as many as it can start."""

import asyncio
import json
from base64 import b64encode
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from starlette.requests import Request

from kvroute.batch import places, run
from kvroute.batch.line_body import BadLineError, body_of
from kvroute.batch.lines import SentLine, open_lines
from kvroute.batch.results import Results
from kvroute.batch.run import MAX_TRIES, RefusedKeyError, Runner
from kvroute.batch.usage import TokenUsage
from kvroute.batch.window import START, Window

ANSWER = {
    "usage": {
        "prompt_tokens": 10,
        "completion_tokens": 2,
        "prompt_tokens_details": {"cached_tokens": 4},
    }
}


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "FIRST_PAUSE_S", 0.0)
    monkeypatch.setattr(places, "MIN_PAUSE_S", 0.001)


@contextmanager
def runner_of(
    folder: Path, count: int, answer: Callable[[httpx.Request], httpx.Response], max_open: int = 64
) -> Iterator[Runner]:
    """Return a runner of a batch; `answer` takes the place of the cluster."""
    path = folder / "in"
    texts = [
        json.dumps({"custom_id": str(n), "url": "/v1/completions", "body": {"prompt": str(n)}})
        for n in range(count)
    ]
    path.write_text("\n".join(texts))
    client = httpx.AsyncClient(transport=httpx.MockTransport(answer), base_url="http://cluster")
    with (
        closing(open_lines(path)) as lines,
        closing(Results(folder / "out", folder / "errors", lines)) as results,
    ):
        yield Runner(
            client,
            lines.read,
            range(count),
            results,
            total=count,
            window=Window(lambda: max_open),
        )


def written(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def prompt_of(request: httpx.Request) -> str:
    return str(json.loads(request.content)["prompt"])


async def test_a_line_has_one_whole_answer() -> None:
    async def sent(url: str, body: bytes) -> Any:
        content, kind = await body_of(SentLine("1", url, msgspec.Raw(body)), downloads=False)
        assert kind == "application/json"
        return json.loads(content)

    asked = b'{"input": "x", "stream": true, "b\\u0061ckground": true, "stream_options": {}}'
    assert await sent("/v1/responses", asked) == {"input": "x"}
    other = b'{"prompt": "background", "background": true}'
    assert await sent("/v1/completions", other) == json.loads(other)  # it is refused there


async def test_a_line_with_a_recording_is_sent_as_a_form(tmp_path: Path) -> None:
    body = {
        "file_url": f"data:audio/wav;base64,{b64encode(b'sound').decode()}",
        "model": "whisper",
        "temperature": 0.5,
        "timestamp_granularities": ["word", "segment"],
        "language": None,
    }
    line = SentLine("1", "/v1/audio/transcriptions", msgspec.Raw(json.dumps(body).encode()))
    content, kind = await body_of(line, downloads=False)

    async def receive() -> Any:
        return {"type": "http.request", "body": content, "more_body": False}

    headers = [(b"content-type", kind.encode())]
    async with Request({"type": "http", "headers": headers}, receive).form() as form:
        *fields, (_, file) = form.multi_items()
        assert not isinstance(file, str)
        assert (await file.read(), file.content_type) == (b"sound", "audio/wav")
        assert file.filename == "recording.wav"
    assert fields == [
        ("model", "whisper"),
        ("temperature", "0.5"),
        ("timestamp_granularities[]", "word"),
        ("timestamp_granularities[]", "segment"),
    ]


@pytest.mark.parametrize("address", ["http://10.0.0.1/a.wav", "data:audio/wav;base64", "", None, 3])
async def test_a_recording_that_cannot_be_read_fails_its_line(address: object) -> None:
    """A router downloads nothing: a client could let it read what only the cluster reaches."""
    raw = msgspec.Raw(json.dumps({"file_url": address}).encode())
    with pytest.raises(BadLineError, match="file_url"):
        await body_of(SentLine("1", "/v1/audio/translations", raw), downloads=False)


async def test_a_line_is_sent_until_it_has_an_answer(tmp_path: Path) -> None:
    sent = Counter[str]()

    def answer(request: httpx.Request) -> httpx.Response:
        sent[prompt_of(request)] += 1
        if sent[prompt_of(request)] == 1:
            raise httpx.ConnectError("refused")
        if sent[prompt_of(request)] == 2:
            return httpx.Response(429, headers={"retry-after": "0"})
        return httpx.Response(200, json=ANSWER)

    with runner_of(tmp_path, 30, answer) as runner:
        await runner.run(lambda progress: None)
    assert set(sent.values()) == {3}
    answered = [line["custom_id"] for line in written(tmp_path / "out")]
    assert sorted(answered, key=int) == [str(number) for number in range(30)]
    progress = runner.progress
    assert (progress.done, progress.failed, progress.away) == (30, 0, "")
    assert progress.usage == TokenUsage(prompt_tokens=300, cached_tokens=120, answer_tokens=60)


async def test_the_progress_says_that_the_cluster_is_away_while_no_line_is_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "REPORT_S", 0.01)
    shown = set[str]()

    def answer(request: httpx.Request) -> httpx.Response:
        if "nobody listens" not in shown:
            raise httpx.ConnectError("nobody listens")
        return httpx.Response(200, json=ANSWER)

    with runner_of(tmp_path, 3, answer) as runner:
        running = runner.run(lambda progress: shown.add(progress.away))
        await asyncio.wait_for(running, timeout=60)
    assert (runner.progress.done, runner.progress.away) == (3, "")


async def test_a_line_that_is_never_accepted_fails_and_the_others_do_not(tmp_path: Path) -> None:
    sent = Counter[str]()

    def answer(request: httpx.Request) -> httpx.Response:
        sent[prompt_of(request)] += 1
        return httpx.Response(503 if prompt_of(request) == "3" else 200, json={"a": 1})

    with runner_of(tmp_path, 6, answer) as runner:
        await runner.run(lambda progress: None)
    assert sent["3"] == MAX_TRIES
    (failed,) = written(tmp_path / "errors")
    assert (failed["custom_id"], failed["response"]["status_code"]) == ("3", 503)
    assert len(written(tmp_path / "out")) == 5


@pytest.mark.parametrize("pause", ["inf", "nan", "-1", "1e99"])
async def test_no_answer_makes_a_line_wait_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pause: str
) -> None:
    monkeypatch.setattr(run, "MAX_PAUSE_S", 0.01)
    sent = Counter[str]()

    def answer(request: httpx.Request) -> httpx.Response:
        sent[prompt_of(request)] += 1
        if sent[prompt_of(request)] == 1:
            return httpx.Response(503, headers={"retry-after": pause})
        return httpx.Response(200, json=ANSWER)

    with runner_of(tmp_path, 3, answer) as runner:
        await asyncio.wait_for(runner.run(lambda progress: None), timeout=60)
    assert (runner.progress.done, runner.progress.failed) == (3, 0)


async def test_a_refused_line_is_sent_again_when_another_line_of_the_batch_is_answered(
    tmp_path: Path,
) -> None:
    """Without a pause: here, the batch would have to wait for the time of each refusal."""
    running, most, refusals = 0, 0, 0

    async def answer(request: httpx.Request) -> httpx.Response:
        nonlocal running, most, refusals
        if running == 2:
            refusals += 1
            return httpx.Response(429, headers={"retry-after": "3600"}, text="limit reached")
        running += 1
        most = max(most, running)
        while refusals < START - 2:  # until all lines with which the batch begins have arrived
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.001)
        running -= 1
        return httpx.Response(200, json=ANSWER)

    with runner_of(tmp_path, 100, answer) as runner:  # type: ignore[arg-type]
        await runner.run(lambda progress: None)
    assert (runner.progress.done, runner.progress.failed) == (100, 0)
    assert (most, refusals < START) == (2, True)


async def test_a_line_waits_for_as_long_as_the_cluster_has_no_place_for_it(tmp_path: Path) -> None:
    shown, tries = list[tuple[int, str]](), 0

    def answer(request: httpx.Request) -> httpx.Response:
        nonlocal tries
        tries += 1
        return httpx.Response(429 if tries <= MAX_TRIES + 5 else 200, text="full")

    with runner_of(tmp_path, 1, answer) as runner:
        await runner.run(lambda progress: shown.append((progress.open, progress.refusal)))
    assert (runner.progress.done, runner.progress.failed) == (1, 0)
    assert (0, "full") in shown
    assert runner.progress.refusal == ""


async def test_a_wrong_key_ends_the_batch_without_a_result(tmp_path: Path) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(401, text="wrong key")

    with (
        runner_of(tmp_path, 6, answer) as runner,
        pytest.raises(RefusedKeyError, match="wrong key"),
    ):
        await runner.run(lambda progress: None)
    assert (tmp_path / "out").read_text() == ""
    assert not (tmp_path / "errors").exists()


@pytest.mark.parametrize("max_open", [5, 50])
async def test_no_more_requests_are_open_than_the_batch_may_have(
    tmp_path: Path, max_open: int
) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, json={})

    most = []
    with runner_of(tmp_path, 300, answer, max_open) as runner:
        await runner.run(lambda progress: most.append(progress.open))
    assert max(most) <= max_open


async def test_a_wait_of_milliseconds_in_the_queue_does_not_make_a_batch_slow(
    tmp_path: Path,
) -> None:
    """Each line waits for 2 ms, and its answer takes longer: the open requests still grow."""
    most = []

    async def answer(request: httpx.Request) -> httpx.Response:
        await asyncio.sleep(0.02)
        return httpx.Response(200, json={}, headers={"x-kvroute-queued-s": "0.002"})

    with runner_of(tmp_path, 300, answer) as runner:  # type: ignore[arg-type]
        await runner.run(lambda progress: most.append(progress.open))
    assert max(most) > START


async def test_a_body_that_is_not_one_line_of_json_is_written_in_one_line(tmp_path: Path) -> None:
    bodies = {"0": b'{\n "a": 1\n}', "1": b"no JSON\n", "2": b"\xff"}

    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, content=bodies[prompt_of(request)])

    with runner_of(tmp_path, 3, answer) as runner:
        await runner.run(lambda progress: None)
    results = written(tmp_path / "out")
    assert {line["custom_id"]: line["response"]["body"] for line in results} == {
        "0": {"a": 1},
        "1": "no JSON\n",
        "2": "\ufffd",
    }


async def test_a_line_that_breaks_something_costs_only_itself(tmp_path: Path) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        if prompt_of(request) == "3":
            raise RuntimeError("broken")
        return httpx.Response(200, json=ANSWER)

    with runner_of(tmp_path, 6, answer) as runner:
        await runner.run(lambda progress: None)
    (failed,) = written(tmp_path / "errors")
    assert (failed["custom_id"], failed["response"]["status_code"]) == ("3", 500)
    assert len(written(tmp_path / "out")) == 5


async def test_an_answer_that_forbids_another_try_is_final(tmp_path: Path) -> None:
    sent = Counter[str]()

    def answer(request: httpx.Request) -> httpx.Response:
        sent[prompt_of(request)] += 1
        return httpx.Response(503, headers={"x-should-retry": "false"}, json={})

    with runner_of(tmp_path, 3, answer) as runner:
        await runner.run(lambda progress: None)
    assert set(sent.values()) == {1}
