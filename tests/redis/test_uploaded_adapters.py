"""Adapters are uploaded to a router: what it keeps, and what it refuses."""

import os
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis

from kvroute.adapters.added import AdapterFiles
from kvroute.adapters.files import digest_of
from kvroute.router.adapters.adapter_uploads import AdapterUploads
from kvroute.store.adapters import Adapters
from tests.support.adapter_routes import Model, message, serving
from tests.support.adapters import write_adapter


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    return write_adapter(tmp_path / "mine" / "sql", seed=0, layers=1, width=64)


@pytest.fixture
async def model(redis: Redis, tmp_path: Path) -> AsyncIterator[Model]:
    root = tmp_path / "root"
    root.mkdir()
    model = Model(Adapters(redis, uuid.uuid4().hex), root)
    model.check = lambda path: AdapterFiles(digest=digest_of(Path(path)), rank=8)
    model.adapter_uploads = AdapterUploads(
        model.adapters, root=root, cluster="c", model="m", max_mb=1
    )
    yield model
    model.adapter_uploads.close()


@pytest.fixture
async def http(model: Model) -> AsyncIterator[httpx.AsyncClient]:
    async with serving(model) as client:
        yield client.http


async def send(http: httpx.AsyncClient, folder: Path, **changed: Any) -> httpx.Response:
    fields = {"adapter_config": (folder / "adapter_config.json").read_bytes()}
    weights = (folder / "adapter_model.safetensors").read_bytes()
    files = {"file": ("adapter_model.safetensors", changed.pop("file", weights))}
    return await http.post("/v1/adapters/files", data=fields | changed, files=files)


def kept(model: Model) -> list[str]:
    """Return the names of all files of uploads on the router's machine."""
    root = model.settings.lora_root
    return [name for _, _, names in os.walk(root) for name in names]


async def test_an_uploaded_adapter_can_be_added(
    http: httpx.AsyncClient, model: Model, adapter: Path
) -> None:
    stored = (await send(http, adapter)).json()
    assert stored["rank"] == 8
    assert stored["digest"] == digest_of(adapter)
    body = {"lora_name": "sql", "lora_path": stored["path"]}
    assert (await http.post("/v1/load_lora_adapter", json=body)).status_code == 200
    found = model.adapters.find("sql")
    assert found is not None
    assert found.path == str(model.settings.lora_root / stored["path"])
    assert found.digest == stored["digest"]


async def test_the_same_files_are_kept_once(
    http: httpx.AsyncClient, model: Model, adapter: Path
) -> None:
    first, second = [(await send(http, adapter)).json() for _ in range(2)]
    assert first == second
    assert sorted(kept(model)) == ["adapter_config.json", "adapter_model.safetensors"]


@pytest.mark.parametrize(
    ("changed", "status", "said"),
    [
        ({"file": b"no weights"}, 400, "is not a safetensors file"),
        ({"file": b""}, 400, "is not a safetensors file"),
        ({"file": bytes((1 << 20) + 1)}, 413, "--max-adapter-mb"),
        ({"adapter_config": "{"}, 400, "adapter_config.json"),
        ({"adapter_config": ""}, 400, "no field `adapter_config`"),
        ({"adapter_config": "x" * (1 << 21)}, 400, "more than 1048576 bytes"),
    ],
)
async def test_files_that_cannot_be_used_are_not_kept(
    http: httpx.AsyncClient,
    model: Model,
    adapter: Path,
    changed: dict[str, Any],
    status: int,
    said: str,
) -> None:
    refusal = message(await send(http, adapter, **changed), status)
    assert said in refusal
    assert str(model.settings.lora_root) not in refusal
    assert kept(model) == []


async def test_a_body_that_is_no_form_is_refused(http: httpx.AsyncClient) -> None:
    response = await http.post("/v1/adapters/files", json={})
    assert "`adapter_config` and `file`" in message(response, 415)


async def test_a_cluster_without_the_folder_stores_nothing(redis: Redis, adapter: Path) -> None:
    async with serving(Model(Adapters(redis, "m"), root=None)) as client:
        assert "--lora-root FOLDER" in message(await send(client.http, adapter))


async def test_a_folder_that_cannot_be_written_is_reported(
    http: httpx.AsyncClient, model: Model, adapter: Path
) -> None:
    root = str(model.settings.lora_root)
    os.rename(root, f"{root}-away")
    os.symlink("/dev/null", root)
    assert "cannot be used" in message(await send(http, adapter), 503)


async def test_nothing_is_deleted_before_the_adapters_in_redis_are_known(
    http: httpx.AsyncClient, model: Model, adapter: Path, tmp_path: Path
) -> None:
    stored = (await send(http, adapter)).json()
    folder = model.settings.lora_root / stored["path"]
    os.utime(folder, (0, 0))
    other = write_adapter(tmp_path / "other", seed=1, layers=1, width=64)
    await send(http, other)
    assert folder.is_dir()  # Redis may be away, or its adapters have not been read yet
    body = {"lora_name": "other", "lora_path": (await send(http, other)).json()["path"]}
    assert (await http.post("/v1/load_lora_adapter", json=body)).status_code == 200
    await send(http, other)
    assert not folder.exists()
