"""Who may use the routes of files and batches, and what an upload counts for."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI, Response

from kvroute.features import batches
from kvroute.features.batches import file_routes
from kvroute.features.batches.service import batch_service
from kvroute.features.gate import Caller
from kvroute.features.router_service import RouterServices
from kvroute.router.api.errors import ApiError, response
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
