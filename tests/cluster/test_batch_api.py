"""OpenAI's Files and Batch API with the official client."""

import json
import time
import uuid
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from openai import BadRequestError, ConflictError, NotFoundError, OpenAI
from openai.types import Batch

from tests.support.batches import CHAT, FINAL, completed, create
from tests.support.clients import openai_client
from tests.support.serving import Cluster
from tests.support.waiting import wait_until


@pytest.fixture
def model(client: OpenAI) -> str:
    return client.models.list().data[0].id


@pytest.fixture(scope="module", autouse=True)
def _quiet(simulated_cluster: Cluster) -> Iterator[None]:
    """Wait at the end until no batch runs: other modules count what this cluster does."""
    yield
    with openai_client(simulated_cluster) as client:
        for batch in client.batches.list():
            ended(client, batch)


def line(custom_id: str, body: dict[str, Any], url: str = CHAT) -> str:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body})


def chats(model: str, count: int, *, long: int = 0) -> list[str]:
    """Return lines with short answers, and `long` lines with answers that take ten seconds."""
    return [
        line(
            str(number),
            {
                "model": model,
                "messages": [{"role": "user", "content": f"{number % 7} {'x ' * 50}{number}"}],
                "max_tokens": 2 if number < count else 5000,
            },
        )
        for number in range(count + long)
    ]


def ended(client: OpenAI, batch: Batch) -> Batch:
    """Wait until a batch has ended, and return it."""
    found = [batch]

    def is_ended() -> bool:
        found.append(client.batches.retrieve(batch.id))
        return found[-1].status in FINAL

    wait_until(is_ended)
    return found[-1]


def results(client: OpenAI, file_id: str | None) -> dict[str, dict[str, Any]]:
    """Return the lines of a file with results, by custom_id; each must be there once."""
    assert file_id is not None
    lines = [json.loads(text) for text in client.files.content(file_id).text.splitlines()]
    by_id = {result["custom_id"]: result for result in lines}
    assert len(by_id) == len(lines)
    return by_id


def test_the_life_of_a_batch(client: OpenAI, model: str) -> None:
    batch = create(client, chats(model, 40), metadata={"night": "1"})
    assert (batch.status, batch.metadata) == ("validating", {"night": "1"})
    assert batch.expires_at == batch.created_at + 86_400
    batch = ended(client, batch)
    assert batch.status == "completed"
    assert batch.request_counts is not None
    assert batch.request_counts.model_dump() == {"total": 40, "completed": 40, "failed": 0}
    assert batch.created_at <= (batch.in_progress_at or 0) <= (batch.finalizing_at or 0)
    assert (batch.finalizing_at or 0) <= (batch.completed_at or 0)
    assert batch.usage is not None
    assert batch.usage.output_tokens == 80
    assert batch.error_file_id is None
    found = results(client, batch.output_file_id)
    assert found.keys() == {str(number) for number in range(40)}
    response = found["0"]["response"]
    assert response["status_code"] == 200
    assert response["request_id"]
    assert response["body"]["object"] == "chat.completion"
    assert batch.id in [other.id for other in client.batches.list()]


def test_a_bad_line_costs_only_itself(client: OpenAI, model: str) -> None:
    lines = [
        line(str(tokens), {"model": model, "prompt": "x", "max_tokens": tokens}, "/v1/completions")
        for tokens in (1, -1, 2)
    ]
    lines.append(line("unknown", {"model": "unknown", "prompt": "x"}, "/v1/completions"))
    lines.append(line("stream", {"model": model, "prompt": "x", "stream": True}, "/v1/completions"))
    batch = ended(client, create(client, lines, "/v1/completions"))
    assert batch.status == "completed"
    assert batch.request_counts is not None
    assert (batch.request_counts.completed, batch.request_counts.failed) == (3, 2)
    assert results(client, batch.output_file_id).keys() == {"1", "2", "stream"}
    errors = results(client, batch.error_file_id)
    statuses = {id_: error["response"]["status_code"] for id_, error in errors.items()}
    assert statuses == {"-1": 400, "unknown": 404}
    assert errors["unknown"]["response"]["body"]["error"]["code"] == "model_not_found"


def test_a_bad_file_is_refused_with_its_line_numbers(client: OpenAI, model: str) -> None:
    good = chats(model, 3)
    lines = [good[0], "{", good[1], good[0], line("url", {}, "/v1/completions"), "[]"]
    batch = ended(client, create(client, lines))
    assert batch.status == "failed"
    assert batch.output_file_id is None
    assert batch.errors is not None
    found = [(error.line, error.code) for error in batch.errors.data or ()]
    assert found == [
        (2, "invalid_json_line"),
        (4, "duplicate_custom_id"),
        (5, "mismatched_endpoint"),
        (6, "invalid_request"),
    ]
    empty = ended(client, create(client, ["", " "]))
    assert empty.errors is not None
    assert [error.code for error in empty.errors.data or ()] == ["empty_file"]


def test_a_cancelled_batch_keeps_its_results(client: OpenAI, model: str) -> None:
    batch = create(client, chats(model, 30, long=60))
    wait_until(lambda: completed(client, batch.id) > 0)
    output = client.batches.retrieve(batch.id).output_file_id
    assert results(client, output)  # it can be read while the batch runs
    with pytest.raises(ConflictError, match="still runs"):
        client.files.delete(output or "")
    assert client.batches.cancel(batch.id).status in ("cancelling", "cancelled")
    batch = ended(client, batch)
    assert batch.status == "cancelled"
    assert batch.cancelling_at is not None
    done, left = results(client, batch.output_file_id), results(client, batch.error_file_id)
    assert len(done) + len(left) == 90
    assert done.keys().isdisjoint(left)
    assert {error["error"]["code"] for error in left.values()} == {"batch_cancelled"}
    assert {error["response"] for error in left.values()} == {None}
    assert client.batches.cancel(batch.id).status == "cancelled"


def test_a_batch_expires_at_the_end_of_its_window(client: OpenAI, model: str) -> None:
    lines = chats(model, 30, long=60)
    for window_s in (4, 8, 16, 32):
        batch = ended(client, create(client, lines, completion_window=f"{window_s}s"))
        assert batch.status == "expired"
        if batch.in_progress_at is not None:
            break  # otherwise this machine had not yet checked the lines when the window ended
    left = results(client, batch.error_file_id)
    assert {error["error"]["code"] for error in left.values()} == {"batch_expired"}
    assert batch.request_counts is not None
    assert batch.request_counts.completed + len(left) == 90


def test_a_file_is_stored_listed_and_deleted(client: OpenAI, cluster: Cluster) -> None:
    content = bytes(range(256)) * 5000
    file = client.files.create(
        file=('a \u00e9"b.bin', content),
        purpose="user_data",
        expires_after={"anchor": "created_at", "seconds": 3600},
    )
    assert (file.bytes, file.purpose) == (len(content), "user_data")
    assert file.expires_at == file.created_at + 3600
    assert client.files.retrieve(file.id).filename == 'a \u00e9"b.bin'
    assert client.files.content(file.id).read() == content
    assert file.id in [other.id for other in client.files.list(purpose="user_data")]
    assert file.id not in [other.id for other in client.files.list(purpose="batch")]
    url = f"{cluster.url}/v1/files/{file.id}/content"
    for header, start, end in (("2-9", 2, 10), ("1279990-", 1279990, None), ("-3", -3, None)):
        part = httpx.get(url, headers={"range": f"bytes={header}"}, timeout=60)
        assert (part.status_code, part.content) == (206, content[start:end])
    assert httpx.get(url, headers={"range": "bytes=1280000-"}, timeout=60).status_code == 416
    assert httpx.get(url, headers={"range": "lines=1-2"}, timeout=60).content == content
    assert client.files.delete(file.id).deleted
    with pytest.raises(NotFoundError):
        client.files.retrieve(file.id)


def test_lists_have_pages(client: OpenAI) -> None:
    ids = [client.files.create(file=b"x", purpose="evals").id for _ in range(5)]
    listed = [file.id for file in client.files.list(purpose="evals", order="asc", limit=2)]
    assert set(listed) >= set(ids)
    assert len(listed) == len(set(listed))
    page = client.files.list(purpose="evals", limit=2)
    assert len(page.data) == 2
    assert page.has_more


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"endpoint": "/v1/nothing"}, "endpoint"),
        ({"completion_window": "soon"}, "completion_window"),
        ({"completion_window": "90d"}, "completion_window"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"metadata": {str(n): "x" for n in range(17)}}, "metadata"),
        ({"input_file_id": "../../etc/passwd"}, "No such File"),
        ({"input_file_id": "file-" + "0" * 32}, "No such File"),
    ],
)
def test_wrong_batches_are_refused(
    client: OpenAI, cluster: Cluster, body: dict[str, Any], message: str
) -> None:
    file = client.files.create(file=b"{}", purpose="batch")
    good = {"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h"}
    refused = httpx.post(f"{cluster.url}/v1/batches", json=good | body, timeout=60)
    assert refused.status_code in (400, 404)
    assert message in refused.json()["error"]["message"]


def test_wrong_uploads_are_refused(client: OpenAI, cluster: Cluster) -> None:
    with pytest.raises(BadRequestError, match="purpose"):
        client.files.create(file=b"x", purpose="nonsense")  # type: ignore[arg-type]
    url = f"{cluster.url}/v1/files"
    for sent, status in (
        ({"data": {"purpose": "batch"}, "files": {"other": b"x"}}, 400),
        ({"json": {"purpose": "batch"}}, 415),
        ({"data": {"purpose": "batch"}}, 415),
        ({"content": b"--x", "headers": {"content-type": "multipart/form-data; boundary=x"}}, 400),
        ({"content": b"x", "headers": {"content-type": "multipart/form-data"}}, 415),
    ):
        refused = httpx.post(url, **sent, timeout=60)
        assert refused.status_code == status, refused.text
        assert refused.json()["error"]["message"]
    foreign = {"origin": "https://evil.example"}
    form: Any = {"files": {"file": b"x"}, "data": {"purpose": "batch"}}
    answer = httpx.post(url, **form, headers=foreign, timeout=60)
    assert answer.status_code == 403


def test_a_purpose_may_follow_the_file(cluster: Cluster) -> None:
    """OpenAI's JavaScript client sends the file first."""
    body = (
        b'--x\r\ncontent-disposition: form-data; name="file"; filename="f"\r\n\r\n{}\r\n'
        b'--x\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--x--\r\n'
    )
    headers = {"content-type": "multipart/form-data; boundary=x"}
    answer = httpx.post(f"{cluster.url}/v1/files", content=body, headers=headers, timeout=60)
    assert (answer.json()["purpose"], answer.json()["bytes"]) == ("batch", 2)
    refused = httpx.post(
        f"{cluster.url}/v1/files",
        content=body.replace(b"batch", b"other"),
        headers=headers,
        timeout=60,
    )
    assert refused.status_code == 400


def test_other_requests_are_answered_while_a_large_file_is_uploaded(cluster: Cluster) -> None:
    """An upload is neither kept in memory nor does it stop the router."""
    seen: list[int] = []

    def parts() -> Any:
        yield b'--x\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nuser_data\r\n'
        yield b'--x\r\ncontent-disposition: form-data; name="file"; filename="f"\r\n\r\n'
        for _ in range(40):
            yield b"y" * (1 << 20)
            seen.append(httpx.get(f"{cluster.url}/health", timeout=60).status_code)
        yield b"\r\n--x--\r\n"

    headers = {"content-type": "multipart/form-data; boundary=x"}
    answer = httpx.post(f"{cluster.url}/v1/files", content=parts(), headers=headers, timeout=60)
    assert answer.json()["bytes"] == 40 << 20
    assert seen == [200] * 40


def test_a_batch_does_not_delay_other_clients(client: OpenAI, model: str) -> None:
    """A request is answered at once although a batch has many long lines left."""
    batch = create(client, chats(model, 30, long=60))
    wait_until(lambda: client.batches.retrieve(batch.id).status == "in_progress")
    try:
        for _ in range(5):
            answer = client.chat.completions.with_raw_response.create(
                model=model, messages=[{"role": "user", "content": "Hello"}], max_tokens=2
            )
            assert float(answer.headers.get("x-kvroute-queued-s") or 0) == 0
            time.sleep(0.2)
        assert client.batches.retrieve(batch.id).status == "in_progress"
    finally:
        client.batches.cancel(batch.id)


def test_a_request_that_is_sent_again_creates_nothing_again(client: OpenAI, model: str) -> None:
    again = client.with_options(default_headers={"Idempotency-Key": uuid.uuid4().hex})
    content = "\n".join(chats(model, 2)).encode()
    files = [again.files.create(file=("a", content), purpose="batch") for _ in range(2)]
    assert files[0] == files[1]
    asked: Any = {"input_file_id": files[0].id, "endpoint": CHAT, "completion_window": "24h"}
    batches = [again.batches.create(**asked).id for _ in range(2)]
    assert batches[0] == batches[1] != client.batches.create(**asked).id
    with pytest.raises(BadRequestError, match=f"has created {batches[0]}"):
        again.batches.create(**asked, metadata={"other": "1"})
    with pytest.raises(BadRequestError, match="has 300 characters"):
        client.files.create(
            file=("a", content), purpose="batch", extra_headers={"Idempotency-Key": "k" * 300}
        )
