"""Which batches a router runs, and what it shows of them."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from kvroute.features.batches import report, runner
from kvroute.features.batches.batch_state import BatchState
from kvroute.features.batches.batches import BatchBody, Batches, as_object
from kvroute.features.batches.files import Files, FileUpload
from kvroute.features.batches.runner import BatchRunner
from kvroute.features.batches.stores.folder import Folder
from kvroute.features.gate import ANYONE

CHAT = "/v1/chat/completions"
LINE = {"custom_id": "1", "url": CHAT, "body": {"model": "m", "messages": []}}


class Cluster:
    """A store with batches, and one router without a cluster behind it."""

    def __init__(self, folder: Path) -> None:
        self.store = Folder(folder)
        self.files = Files(self.store, max_file_bytes=1 << 20, quota_bytes=1 << 30)
        self.batches = Batches(self.store, self.files)
        self.threads = ThreadPoolExecutor(1)
        self.may_run = True

        async def yes(batch: str) -> bool:
            return True

        leases: Any = SimpleNamespace(take=yes, release=yes)
        self.answer = httpx.Response(200, json={"usage": {}})
        transport = httpx.MockTransport(lambda request: self.answer)
        self.runner = BatchRunner(
            "router",
            self.store,
            self.files,
            self.batches,
            leases=leases,
            client=lambda record: httpx.AsyncClient(transport=transport, base_url="http://none"),
            may_run=lambda record: self.may_run,
            max_open=1,
            max_line_bytes=1 << 20,
            threads=self.threads,
        )

    async def create(self, window: str = "24h") -> str:
        """Create a batch with one line; return its id."""

        async def content() -> AsyncIterator[bytes]:
            yield json.dumps(LINE).encode()

        upload = FileUpload("in.jsonl", "batch", ttl_s=30 * 86_400)
        file = await self.files.add(content(), lambda: upload, ANYONE)
        body = BatchBody(input_file_id=file.id, endpoint=CHAT, completion_window=window)
        return (await self.batches.create(body, ANYONE)).id

    async def status(self, id_: str) -> str:
        return (await self.batches.get(id_, "")).status


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    monkeypatch.setattr(runner, "LOOK_S", 0.01)
    monkeypatch.setattr(runner, "POLITE_S", 0.01)
    cluster = Cluster(tmp_path)
    yield cluster
    cluster.store.close()
    cluster.threads.shutdown()


async def test_a_batch_that_nobody_runs_ends_when_it_is_cancelled(cluster: Cluster) -> None:
    """Without a router that would have to look at it first."""
    waiting, cancelled = await cluster.create(), await cluster.create()
    batch = await cluster.batches.cancel(cancelled, "")
    assert (batch.status, batch.end is None) == ("cancelled", False)
    assert await cluster.status(waiting) == "validating"


async def test_a_batch_that_has_begun_and_is_cancelled_ends_while_others_wait_for_a_place(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "MAX_RUNS", 0)
    waiting, cancelled = await cluster.create(), await cluster.create()
    await BatchState(cluster.store, cancelled).claim("router that is lost")
    await cluster.batches.cancel(cancelled, "")
    running = asyncio.create_task(cluster.runner.run())
    while await cluster.status(cancelled) != "cancelled":
        await asyncio.sleep(0.01)
    assert await cluster.status(waiting) == "validating"
    running.cancel()


async def test_a_batch_that_expires_before_it_has_begun_ends_while_others_wait_for_a_place(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "MAX_RUNS", 0)
    monkeypatch.setattr(runner, "MAX_ENDING", 0)
    waiting, expired = await cluster.create(), await cluster.create("1s")
    running = asyncio.create_task(cluster.runner.run())
    while await cluster.status(expired) != "expired":
        await asyncio.sleep(0.01)
    assert await cluster.status(waiting) == "validating"
    running.cancel()


async def test_a_router_whose_clock_jumps_ends_no_batch_and_deletes_no_file(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    id_, now_s = await cluster.create(), time.time()
    cluster.files.clock.update((int(now_s), 0))
    monkeypatch.setattr(time, "time", lambda: now_s + 90 * 86_400)
    (found,) = await cluster.runner._unfinished()
    assert found.id == id_
    await cluster.files.delete_expired()
    await cluster.files.get(found.record.input_file_id, "")


async def test_a_router_takes_several_batches_at_a_time_if_many_wait(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(12):
        await cluster.create()
    await cluster.runner._look()
    assert len(cluster.runner._tasks) == 3  # others are left to other routers
    await cluster.runner.stop()


async def test_a_figure_shows_batches_until_they_end(cluster: Cluster) -> None:
    id_ = await cluster.create()
    running = asyncio.create_task(cluster.runner.run())
    seen = set()
    while await cluster.status(id_) != "completed":
        seen |= {figure.note for figure in report.figures(cluster.runner)}
        await asyncio.sleep(0.01)
    assert seen
    while report.figures(cluster.runner):
        await asyncio.sleep(0.01)
    running.cancel()


async def test_a_batch_fails_if_its_tenant_has_no_key_any_more(cluster: Cluster) -> None:
    cluster.may_run = False
    id_ = await cluster.create()
    running = asyncio.create_task(cluster.runner.run())
    while (batch := await cluster.batches.get(id_, "")).end is None:
        await asyncio.sleep(0.01)
    running.cancel()
    assert batch.status == "failed"
    assert [fault.code for fault in batch.end.faults] == ["invalid_api_key"]


async def test_a_batch_of_failed_lines_has_no_output_file(cluster: Cluster) -> None:
    cluster.answer = httpx.Response(400, json={"error": {"message": "bad"}})
    id_ = await cluster.create()
    running = asyncio.create_task(cluster.runner.run())
    while await cluster.status(id_) != "completed":
        await asyncio.sleep(0.01)
    running.cancel()
    shown = as_object(await cluster.batches.get(id_, ""))
    assert shown["output_file_id"] is None
    listed = {record.id for record in await cluster.files.listed("")}
    assert listed == {shown["error_file_id"], shown["input_file_id"]}
