"""Who may use the routes of files and batches, and what an upload counts for."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI, Request, Response

from kvroute.features import batches
from kvroute.features.batches import file_routes
from kvroute.features.batches.service import batch_service
from kvroute.features.gate import Caller
from kvroute.features.router_service import RouterServices
from kvroute.router.api.errors import ApiError, response
from kvroute.router.endpoints.form import UploadForm
from kvroute.router.middleware.caller_check import CallerCheck, client_for, roles_for
from tests.support.gates import ClosedGate
from tests.support.router_parts import fake_base
from tests.support.routes import routes
from tests.support.waiting import until


def test_each_route_needs_the_role_use() -> None:
    found = {(method, path) for method, path in routes(batches.Batching().routes())}
    assert {roles_for(method, path) for method, path in found} == {("use",)}
    assert ("POST", "/v1/files") in found
    assert ("POST", "/v1/batches/{batch_id}/cancel") in found


async def test_an_upload_counts_while_it_arrives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    service, gate = batch_service(fake_base()), ClosedGate()
    assert service is not None
    http, may_end = FastAPI(), asyncio.Event()
    http.state.services, http.state.gate = RouterServices([service]), gate
    http.state.models = None
    http.include_router(file_routes.routes)

    async def refuse(request: Any, error: Any) -> Response:
        return response(error, path=request.url.path)

    http.exception_handler(ApiError)(refuse)
    http.add_middleware(CallerCheck, gate=gate, refused=lambda _: None)

    async def half() -> AsyncIterator[bytes]:
        yield b"--x\r\n"
        await may_end.wait()

    client = client_for(http, Caller("acme"))
    headers = {"content-type": "multipart/form-data; boundary=x"}
    task = asyncio.create_task(client.post("/v1/files", content=half(), headers=headers))
    await until(lambda: len(gate.entries) == 1)
    may_end.set()
    assert (await task).status_code == 400  # the form has no file
    assert gate.entries == []


def form(*fields: bytes, before: bytes = b"", end: bytes = b"--x--\r\n") -> UploadForm:
    """Return a form with these parts, which comes byte by byte."""
    body = before + b"".join(b"--x\r\n" + field + b"\r\n" for field in fields) + end
    sent = [
        *({"type": "http.request", "body": bytes([each]), "more_body": True} for each in body),
        {"type": "http.request", "body": b"", "more_body": False},
    ]
    sent.reverse()

    async def receive() -> Any:
        return sent.pop()

    headers = [(b"content-type", b"multipart/form-data; boundary=x")]
    return UploadForm(Request({"type": "http", "headers": headers}, receive), expected="`file`")


def field(name: str, value: str, more: str = "") -> bytes:
    head = f'Content-Disposition: form-data; name="{name}"{more}'
    return f"{head}\r\n\r\n{value}".encode()


async def content_of(form: UploadForm) -> bytes:
    await form.begin()
    return b"".join([data async for data in form.content()])


@pytest.mark.parametrize("before", [b"", b"\r\n", b"This is a form.\r\n-- no --x\r\n"])
async def test_text_before_the_first_boundary_is_left_out(before: bytes) -> None:
    read = form(field("purpose", "batch"), field("file", "--x is here"), before=before)
    assert await content_of(read) == b"--x is here"
    assert read.fields == {"purpose": "batch"}


@pytest.mark.parametrize("end", [b"", b"--x", b"--x-", b"--x\r\n"])
async def test_a_form_that_is_cut_off_is_refused(end: bytes) -> None:
    with pytest.raises(ApiError, match="the form is not complete"):
        await content_of(form(field("file", "text"), end=end))


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ('; filename="a.jsonl"', "a.jsonl"),
        ("; filename*=UTF-8''na%C3%AFve%20%E2%82%AC.jsonl", "naïve €.jsonl"),
        ("; filename=\"ascii\"; FileName*=iso-8859-1'en'na%EFve", "naïve"),
        ("; filename*=nonsense", "nonsense"),
        ('; filename="a"; filename*', "a"),
    ],
)
async def test_a_file_has_the_name_that_any_client_gives_it(given: str, name: str) -> None:
    read = form(field("file", "text", given))
    await read.begin()
    assert read.filename == name


@pytest.mark.parametrize(
    ("fields", "ttl_s"),
    [
        ({"expires_after[anchor]": "created_at", "expires_after[seconds]": "7200"}, 7200),
        ({"expires_after": '{"anchor": "created_at", "seconds": 7200}'}, 7200),
        ({"purpose": "batch"}, file_routes.DEFAULT_TTL_S),
        ({"purpose": "user_data"}, None),
    ],
)
def test_a_file_expires_as_either_form_says(fields: dict[str, str], ttl_s: int | None) -> None:
    assert file_routes._ttl_s(fields) == ttl_s


@pytest.mark.parametrize(
    "fields",
    [
        {"expires_after[seconds]": "1"},
        {"expires_after[seconds]": "x"},
        {"expires_after[anchor]": "now", "expires_after[seconds]": "7200"},
        {"expires_after[anchor]": "created_at"},
        {"expires_after": "7200"},
        {"expires_after": '{"seconds": 1}'},
        {"expires_after": "{"},
    ],
)
def test_a_wrong_expiry_is_refused(fields: dict[str, str]) -> None:
    with pytest.raises(ApiError, match="expires_after is") as refused:
        file_routes._ttl_s(fields)
    assert (refused.value.status, refused.value.param) == (400, "expires_after")
