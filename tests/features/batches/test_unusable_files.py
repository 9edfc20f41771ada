"""A router whose folder for files cannot be used says so, and serves everything else."""

import asyncio
from pathlib import Path

import pytest
from starlette.requests import Request

from kvroute.features.batches.service import Unusable, _service, batch_service
from kvroute.features.router_service import RouterServices
from kvroute.router.api.errors import ApiError
from tests.support.router_parts import fake_base


def test_the_api_says_which_folder_cannot_be_used_and_why(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    options = {"files_dir": str(tmp_path / "file/files")}
    service = batch_service(fake_base(features={"batches": options}))
    assert isinstance(service, Unusable)
    facts = asyncio.run(service.facts())
    assert not facts["is_default"]
    with pytest.raises(ApiError) as refused:
        asyncio.run(_service(_request_to(service)))
    assert refused.value.status == 503
    assert refused.value.code == "storage_unavailable"
    assert f"{tmp_path}/file/files" in str(refused.value)
    assert facts["problem"] == str(refused.value)


def _request_to(service: Unusable) -> Request:
    """Return a request to an application with this service."""
    from fastapi import FastAPI

    app = FastAPI()
    app.state.services = RouterServices([service])
    return Request({"type": "http", "app": app})
