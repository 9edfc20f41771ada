"""Requests that clients write by themselves: what is wrong with them comes back as JSON."""

import gzip
import json
import socket
from email import message_from_bytes
from typing import Any

import httpx
import pytest
from backports import zstd

from kvroute.process.builtin_model import BUILTIN_MODEL
from tests.support.serving import Cluster
from tests.support.workloads import user

CHATS, MESSAGES = "/v1/chat/completions", "/v1/messages"
MANY = b"".join(b"a%d: b\r\n" % number for number in range(150))
LARGE = b"a: %s\r\n" % (b"b" * 20_000)
WEBSOCKET = (
    b"connection: upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\n"
    b"sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
)


class Raw:
    """A response's status, headers and body, as they came."""

    def __init__(self, data: bytes) -> None:
        head, _, self.body = data.partition(b"\r\n\r\n")
        line, _, headers = head.partition(b"\r\n")
        self.status = int(line.split()[1])
        self.headers = message_from_bytes(headers)

    @property
    def error(self) -> dict[str, Any]:
        assert self.headers["content-type"] == "application/json", self.body
        assert int(self.headers["content-length"]) == len(self.body)
        found: dict[str, Any] = json.loads(self.body)["error"]
        return found


def exchange(cluster: Cluster, data: bytes, *, is_last: bool = False) -> Raw:
    """Send these bytes, and return the response that ends with the connection.

    Args:
        is_last: say that nothing more will come, and only read from then on.
    """
    host, port = cluster.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as client:
        client.sendall(data)
        if is_last:
            client.shutdown(socket.SHUT_WR)
        return Raw(b"".join(iter(lambda: client.recv(65_536), b"")))


def head_of(path: str, *, method: str = "POST", version: str = "1.1") -> bytes:
    return f"{method} {path} HTTP/{version}\r\nhost: localhost\r\nconnection: close\r\n".encode()


def chat(*, stream: bool, tokens: int = 8) -> bytes:
    body = {"model": BUILTIN_MODEL, "messages": user("Hello there"), "max_tokens": tokens}
    content = json.dumps(body | {"stream": stream, "ignore_eos": True}).encode()
    return b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(content) + content


@pytest.mark.parametrize("path", [CHATS, MESSAGES, "/health"])
@pytest.mark.parametrize(
    ("headers", "status", "words"),
    [(MANY, 431, "100 headers"), (LARGE, 431, "16384 bytes"), (WEBSOCKET, 426, "WebSockets")],
)
def test_a_head_that_is_refused_says_why_in_the_shape_of_the_route(
    cluster: Cluster, path: str, headers: bytes, status: int, words: str
) -> None:
    head = head_of(path, method="GET").replace(b"connection: close\r\n", b"")
    answer = exchange(cluster, head + b"x-request-id: mine\r\n" + headers + b"\r\n", is_last=True)
    assert (answer.status, answer.headers["x-request-id"]) == (status, "mine")
    assert words in answer.error["message"]
    assert answer.error["type"] == "invalid_request_error"
    assert (json.loads(answer.body).get("type") == "error") == (path == MESSAGES)
    assert ("param" in answer.error) == (path != MESSAGES)


def test_a_url_that_is_too_long_is_refused(cluster: Cluster) -> None:
    answer = exchange(cluster, head_of("/" + "a" * 9000) + b"\r\n")
    assert answer.status == 414
    assert "8192 bytes" in answer.error["message"]
    assert answer.headers["x-request-id"]


@pytest.mark.parametrize("line", ["OPTIONS * HTTP/1.1", "CONNECT a:1 HTTP/1.1"])
def test_a_request_without_a_path_is_refused(cluster: Cluster, line: str) -> None:
    answer = exchange(cluster, f"{line}\r\nhost: a:1\r\nconnection: close\r\n\r\n".encode())
    assert (answer.status, answer.error["type"]) == (400, "invalid_request_error")


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"hello\r\n\r\n", 400),
        (head_of("/caf\xe9") + b"\r\n", 400),
        (head_of(CHATS) + b"na\xe9me: a\r\n\r\n", 400),
        (head_of(CHATS) + b"content-length: 1\r\ncontent-length: 2\r\n\r\n", 400),
        (head_of(CHATS) + b"a: %s\r\n\r\n" % (b"b" * 200_000), 400),
        (head_of(CHATS) + b"transfer-encoding: chunked\r\n\r\nno size\r\n", 400),
        (head_of(CHATS) + b"transfer-encoding: gzip, chunked\r\n\r\n", 422),
    ],
)
def test_a_request_that_cannot_be_read_is_refused_for_clients_of_any_api(
    cluster: Cluster, data: bytes, status: int
) -> None:
    answer = exchange(cluster, data)
    assert answer.status == status
    assert answer.error.keys() >= {"type", "message"}
    assert json.loads(answer.body)["type"] == "error"


@pytest.mark.parametrize("path", [CHATS, "/v1/files"])
def test_a_compressed_body_is_read_as_the_body_that_it_contains(
    cluster: Cluster, path: str
) -> None:
    if path == CHATS:
        body = json.dumps(
            {"model": BUILTIN_MODEL, "messages": user("Hi"), "max_tokens": 2}
        ).encode()
        content_type = "application/json"
    else:
        file = {"file": ("lines.jsonl", b"{}\n" * 1000)}
        request = httpx.Request("POST", cluster.url, data={"purpose": "batch"}, files=file)
        body, content_type = request.read(), request.headers["content-type"]
    for coding, compressed in (("zstd", zstd.compress(body)), ("gzip", gzip.compress(body))):
        headers = {"content-type": content_type, "content-encoding": coding}
        answer = httpx.post(cluster.url + path, content=compressed, headers=headers, timeout=60)
        assert answer.status_code == 200, answer.text
        assert answer.json().get("bytes", 3000) == 3000
        wrong = httpx.post(cluster.url + path, content=body, headers=headers, timeout=60)
        assert (wrong.status_code, wrong.headers["accept-encoding"]) == (415, "gzip, zstd, deflate")


def test_a_client_that_closes_its_side_is_told_that_it_counts_as_gone(cluster: Cluster) -> None:
    """The answer is long, so that it cannot be there before the end of the client's side is."""
    request = head_of(CHATS) + chat(stream=False, tokens=8000)
    answer = exchange(cluster, request, is_last=True)
    assert answer.status == 400
    assert "closed its side" in answer.error["message"]
    assert answer.headers["x-request-id"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_of_http_1_0_gets_no_chunks(cluster: Cluster, stream: bool) -> None:
    answer = exchange(cluster, head_of(CHATS, version="1.0") + chat(stream=stream))
    assert answer.status == 200
    assert "transfer-encoding" not in answer.headers
    assert int(answer.headers["content-length"]) == len(answer.body)
    assert answer.body.endswith(b"data: [DONE]\n\n") == stream
