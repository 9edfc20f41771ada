"""Every wrong request gets an error in the shape of its API, from one vocabulary."""

import json
from typing import Any

import httpx
import pytest
import requests

from kvroute.contract.error_codes import anthropic_type_of, type_of
from kvroute.features import ALL_CODES
from kvroute.process.builtin_model import BUILTIN_MODEL
from tests.support.serving import Cluster
from tests.support.tiny_audio import sound
from tests.support.workloads import user

CHATS, COMPLETIONS, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"
RESPONSES, SCORING, PREFIXES = "/v1/responses", "/generative_scoring", "/v1/prefixes"
COUNTING = f"{MESSAGES}/count_tokens"
POOLING = ("/v1/embeddings", "/rerank", "/score", "/classify", "/pooling")
GENERATING = (CHATS, COMPLETIONS, RESPONSES, MESSAGES, COUNTING, SCORING, "/tokenize")
POSTED = (*GENERATING, *POOLING, PREFIXES, "/v1/route", "/invocations")

ASKED: dict[str, Any] = {"model": BUILTIN_MODEL, "messages": user("Hi"), "max_tokens": 2}
SCORED = {"model": BUILTIN_MODEL, "query": "a", "items": ["b"], "label_token_ids": [1]}
TEXT, OTHER_SITE = {"content-type": "text/plain"}, {"origin": "http://evil.example"}
LONG = "word " * 100_000


def error_of(response: requests.Response) -> dict[str, Any]:
    """Return the error's members; fails unless they have the shape and the words of their API."""
    body, path = response.json(), response.request.path_url
    assert response.headers["content-type"] == "application/json"
    error: dict[str, Any] = body["error"]
    if path.startswith(MESSAGES):
        assert {*body} == {"type", "error"}
        assert {*error} == {"type", "message"}
        assert (body["type"], error["type"]) == ("error", anthropic_type_of(response.status_code))
    else:
        assert {*body} == {"error"}
        assert {*error} == {"message", "type", "param", "code"}
        assert error["type"] == type_of(response.status_code)
        assert error["code"] in ALL_CODES
    return error


def send(cluster: Cluster, method: str, path: str, **options: Any) -> requests.Response:
    return requests.request(method, cluster.url + path, timeout=60, **options)


@pytest.mark.parametrize("path", POSTED)
@pytest.mark.parametrize(
    ("options", "status", "code"),
    [
        ({"data": b"{"}, 400, "invalid_json"),
        ({"data": b""}, 400, "invalid_json"),
        ({"data": b"[1]"}, 400, "invalid_json"),
        ({"data": b'{"model": "\xff"}'}, 400, "invalid_json"),
        ({"data": b"\x1f\x8b", "headers": {"content-encoding": "gzip"}}, 400, "invalid_value"),
        ({"data": b"{}", "headers": TEXT}, 415, "unsupported_media_type"),
        ({"data": b"{}", "headers": OTHER_SITE}, 403, "foreign_origin"),
        ({"data": b"{}", "headers": {"host": "evil.example"}}, 403, "unknown_host"),
    ],
)
def test_a_request_that_cannot_be_read_is_refused_in_the_same_way_everywhere(
    cluster: Cluster, path: str, options: dict[str, Any], status: int, code: str
) -> None:
    response = send(cluster, "POST", path, **options)
    assert response.status_code == status
    assert error_of(response).get("code", code) == code


@pytest.mark.parametrize(
    ("path", "body", "status", "code", "param"),
    [
        (CHATS, {**ASKED, "model": "no"}, 404, "model_not_found", "model"),
        (MESSAGES, {**ASKED, "model": "no"}, 404, "model_not_found", "model"),
        (CHATS, {**ASKED, "temperature": "hot"}, 400, "invalid_value", "temperature"),
        (CHATS, {**ASKED, "messages": user(LONG)}, 400, "context_length_exceeded", "messages"),
        (CHATS, {**ASKED, "background": True}, 400, "unsupported_parameter", "background"),
        (CHATS, {**ASKED, "prefix_id": "no"}, 404, "prefix_not_found", "prefix_id"),
        (CHATS, {**ASKED, "metadata": {"a": "x" * (17 << 20)}}, 413, "request_too_large", None),
        (MESSAGES, {**ASKED, "timeout": -1}, 400, "invalid_value", "timeout"),
        (RESPONSES, {**ASKED, "previous_response_id": "x"}, 400, "unsupported_parameter", None),
        (SCORING, {**SCORED, "query": {}}, 400, "invalid_value", "query"),
        (SCORING, {**SCORED, "items": {}}, 400, "invalid_value", "items"),
        (PREFIXES, {"id": "a"}, 400, "invalid_value", "prompt"),
        ("/v1/embeddings", {"model": BUILTIN_MODEL, "input": "a"}, 404, "not_found", None),
    ],
)
def test_a_wrong_value_is_named(
    cluster: Cluster, path: str, body: object, status: int, code: str, param: str | None
) -> None:
    response = send(cluster, "POST", path, json=body)
    error = error_of(response)
    assert response.status_code == status
    assert error.get("code", code) == code
    assert param is None or error.get("param", param) == param


@pytest.mark.parametrize(
    ("method", "path", "status", "code", "words"),
    [
        ("GET", "/no", 404, "not_found", "GET /docs lists the routes"),
        ("POST", f"{MESSAGES}/no", 404, "not_found", "GET /docs lists the routes"),
        ("GET", CHATS, 405, "method_not_allowed", "use POST"),
        ("PUT", MESSAGES, 405, "method_not_allowed", "use POST"),
        ("GET", "/v1/models/no", 404, "model_not_found", BUILTIN_MODEL),
        ("GET", f"{PREFIXES}/no", 404, "prefix_not_found", "GET /v1/prefixes"),
        ("GET", f"{RESPONSES}/no", 404, "not_found", "--response-store-mb"),
        ("GET", "/metrics", 404, "not_found", "/v1/metrics/targets"),
        ("GET", "/v1/cluster/tenants?since=x", 400, "invalid_value", "expected a date"),
        ("GET", "/" + "a" * 9000, 414, "url_too_long", "8192 bytes"),
    ],
)
def test_a_wrong_address_leads_to_the_right_one(
    cluster: Cluster, method: str, path: str, status: int, code: str, words: str
) -> None:
    response = send(cluster, method, path)
    error = error_of(response)
    assert (response.status_code, error.get("code", code)) == (status, code)
    assert words in error["message"]


def test_an_unknown_model_is_refused_in_the_format_of_the_client(cluster: Cluster) -> None:
    models, anthropics = f"{cluster.url}/v1/models", {"anthropic-version": "2023-06-01"}
    for path, kind in (("/no", "not_found"), ("?after_id=no", "invalid_request")):
        body = httpx.get(f"{models}{path}", headers=anthropics, timeout=60).json()
        assert body == {"type": "error", "error": body["error"]}
        assert body["error"]["type"] == f"{kind}_error"
    assert httpx.get(f"{models}/no", timeout=60).json()["error"]["code"] == "model_not_found"


def test_the_addresses_that_people_try_first_lead_somewhere(cluster: Cluster) -> None:
    assert send(cluster, "GET", "/").url == f"{cluster.url}/ui"
    page = send(cluster, "GET", "/docs")
    assert page.headers["content-type"].startswith("text/html")
    assert "OpenAI's chat completions" in page.text
    described = json.loads(send(cluster, "GET", "/openapi.json").content)
    assert described["openapi"].startswith("3.")
    assert {CHATS, MESSAGES, "/v1/prefixes/{name}", *POOLING} <= described["paths"].keys()


@pytest.mark.parametrize("path", ["/v1/audio/transcriptions", "/v1/audio/translations"])
def test_a_recording_is_refused_where_no_model_hears(cluster: Cluster, path: str) -> None:
    form = {"data": {"model": BUILTIN_MODEL}, "files": {"file": ("a.wav", sound())}}
    response = send(cluster, "POST", path, **form)
    error = error_of(response)
    assert (response.status_code, error["code"]) == (404, "not_found")
    assert "the simulated engine does not have this route" in error["message"]
