"""The routes that manage LoRA adapters, in front of a replica that is not real."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
from fastapi import FastAPI
from msgspec.structs import replace

from kvroute.contract.records import Load
from kvroute.features.adapters import adapter_routes
from kvroute.features.adapters.adapter_directory import AdapterDirectory
from kvroute.features.adapters.adapter_operations import AdapterOperations
from kvroute.features.adapters.adapter_store import Adapters
from kvroute.features.adapters.added import (
    FEATURE,
    TAKES_ADDED,
    AdapterFiles,
    decode_order,
    encode_files,
)
from kvroute.features.gate import OPEN, Caller
from kvroute.router.api.bodies import Bodies
from kvroute.router.api.errors import ApiError, response
from tests.support.gates import ClosedGate
from tests.support.records import record

ROOT = Path("/srv/adapters")


class Model:
    """A model with one replica, which says of each adapter what `check` returns."""

    def __init__(self, store: Adapters, root: Path | None = ROOT) -> None:
        self.name = "m"
        self.settings: Any = SimpleNamespace(
            lora_root=root, adapters=[SimpleNamespace(name="static")]
        )
        self.check: Callable[[str], AdapterFiles] = lambda path: AdapterFiles(
            digest=f"{abs(hash(path)):032x}"[:32], rank=8
        )
        self.checked: list[str] = []
        replica = replace(record("r", max_variants=4), load=Load(features={FEATURE: TAKES_ADDED}))
        self.replicas: Any = SimpleNamespace(own_records=[replica], get=lambda _: replica)
        self.adapters = AdapterDirectory(store, "router", self._routers)
        parts: list[Any] = [self.adapters, self, self.replicas, self.settings]
        self.operations = AdapterOperations(*parts)

    def feature(self, kind: object) -> "Model":
        return self

    async def _routers(self) -> list[str]:
        return ["router"]

    def variant(self, name: str, tenant: str = "") -> str | None:
        found = self.adapters.find(name, tenant)
        return found.key if found else None

    async def ask(self, method: str, body: bytes, **_: Any) -> bytes:
        assert method == "check_adapter"
        order = decode_order(body)
        self.checked.append(order.path)
        return encode_files(self.check(order.path))


class Client:
    """Sends requests to the routes of a model."""

    def __init__(self, model: Model, http: httpx.AsyncClient, app: FastAPI) -> None:
        self.model = model
        self.http = http
        self._app = app

    def close_gate(self, **limits: int) -> None:
        """Let only the tenant acme in, with these limits."""
        self._app.state.gate = ClosedGate(Caller("acme", limits=limits))

    async def load(self, name: str, path: str = "", **more: Any) -> httpx.Response:
        body = {"lora_name": name, "lora_path": path or name, **more}
        return await self.http.post("/v1/load_lora_adapter", json=body)

    async def unload(self, name: str, **more: Any) -> httpx.Response:
        return await self.http.post("/v1/unload_lora_adapter", json={"lora_name": name, **more})

    async def names(self) -> list[str]:
        data = (await self.http.get("/v1/adapters")).json()["data"]
        return [adapter["name"] for adapter in data]


@asynccontextmanager
async def serving(model: Model) -> AsyncIterator[Client]:
    app = FastAPI()
    models = SimpleNamespace(all=[model], select=lambda name: model)
    app.state.models, app.state.bodies, app.state.gate = models, Bodies(limit_mb=1), OPEN
    app.include_router(adapter_routes.routes)

    @app.exception_handler(ApiError)
    async def refuse(_: Any, error: ApiError) -> Any:
        return response(error)

    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://router") as http:
        yield Client(model, http, app)


def message(refusal: httpx.Response, status: int = 400) -> str:
    assert refusal.status_code == status, refusal.text
    return str(refusal.json()["error"]["message"])
