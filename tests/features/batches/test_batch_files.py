"""Files and batches of tenants: whose they are, their limits, and when they expire."""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from kvroute.features.batches import batches as batches_module
from kvroute.features.batches import files as files_module
from kvroute.features.batches.batch_state import BatchState
from kvroute.features.batches.batches import BatchBody, Batches, as_object
from kvroute.features.batches.files import Files, FileUpload
from kvroute.features.batches.records import FileRecord
from kvroute.features.batches.service import BatchService, batch_service
from kvroute.features.batches.stores.folder import Folder
from kvroute.features.gate import ANYONE, Caller
from kvroute.local.launch import cluster_id
from kvroute.router.api.errors import ApiError
from tests.support.router_parts import fake_base

NO_LIMITS: Mapping[str, int] = {}
CHAT = "/v1/chat/completions"
NO_REDIS = "redis://127.0.0.1:1"


@pytest.fixture
def store(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


@pytest.fixture
def files(store: Folder) -> Files:
    return Files(store, max_file_bytes=100, quota_bytes=1000)


@pytest.fixture
def batches(store: Folder, files: Files) -> Batches:
    return Batches(store, files)


async def parts(size: int) -> AsyncIterator[bytes]:
    for _ in range(size):
        yield b"x"


async def add(
    files: Files,
    size: int = 1,
    tenant: str = "",
    limits: Mapping[str, int] = NO_LIMITS,
    **more: Any,
) -> FileRecord:
    upload = FileUpload("name", "batch", ttl_s=more.get("ttl_s"))
    return await files.add(parts(size), lambda: upload, Caller(tenant, limits=limits))


async def test_a_tenant_sees_only_its_own_files(files: Files) -> None:
    file = await add(files, tenant="acme")
    assert (await files.get(file.id, "acme")).id == file.id
    assert await files.listed("other") == []
    with pytest.raises(ApiError, match="No such File"):
        await files.get(file.id, "other")


@pytest.mark.parametrize(
    ("limits", "sizes", "problem"),
    [
        ({"max_files": 2}, (1, 1, 1), "max_files"),
        ({"max_files": 0}, (1,), "max_files"),
        ({"max_file_bytes": 10}, (6, 5), "max_file_bytes"),
        ({}, (101,), "--max-file-mb"),
        ({}, (100,) * 10, "--files-quota-mb"),
    ],
)
async def test_limits_hold(
    files: Files, store: Folder, limits: Mapping[str, int], sizes: tuple[int, ...], problem: str
) -> None:
    for size in sizes[:-1]:
        await add(files, size, "acme", limits)
    with pytest.raises(ApiError, match=problem):
        await add(files, sizes[-1], "acme", limits)
    assert len(await files.listed("acme")) == len(sizes) - 1
    assert len(await store.names("files")) == 2 * (len(sizes) - 1)


@pytest.mark.parametrize("limits", [{"max_files": 1}, {"max_file_bytes": 100}])
async def test_limits_hold_for_uploads_at_the_same_time(
    files: Files, limits: Mapping[str, int]
) -> None:
    may_end = asyncio.Event()

    async def slowly() -> AsyncIterator[bytes]:
        yield b"x" * 90
        await may_end.wait()

    upload = FileUpload("name", "batch", ttl_s=None)
    slow = asyncio.create_task(files.add(slowly(), lambda: upload, Caller("acme", limits=limits)))
    await asyncio.sleep(0.05)
    (fast,) = await asyncio.gather(add(files, 60, "acme", limits), return_exceptions=True)
    may_end.set()
    results = [fast, *await asyncio.gather(slow, return_exceptions=True)]
    assert len([result for result in results if isinstance(result, FileRecord)]) == 1
    assert len(await files.listed("acme")) == 1


@pytest.mark.parametrize(
    ("limits", "problem"), [({"max_file_bytes": 800}, "max_file_bytes"), ({}, "quota")]
)
async def test_results_count_in_the_limits(
    files: Files, batches: Batches, store: Folder, limits: Mapping[str, int], problem: str
) -> None:
    acme = Caller("acme", limits=limits)
    file = await add(files, tenant="acme")
    body = BatchBody(input_file_id=file.id, endpoint=CHAT)
    batch = await batches.create(body, acme)
    await batches.register_results(batch.record, "output")
    state = BatchState(store, batch.id)
    run = await state.claim("router")
    assert run is not None
    await store.append(state.name(run.own("output")), b"x" * 999 + b"\n")
    for is_over in (False, True):
        if is_over:
            await state.finish(run, "completed")
        with pytest.raises(ApiError, match=problem):
            await add(files, tenant="acme", limits=limits)
        with pytest.raises(ApiError, match=problem):
            await batches.create(body, acme)
    assert await files.used_bytes() == 1001
    await files.delete(await files.get(batch.record.output_file_id, "acme"))
    await add(files, tenant="acme", limits=limits)
    assert await files.used_bytes() == 2


async def test_a_content_without_a_record_is_deleted(files: Files, store: Folder) -> None:
    kept = await add(files)
    await store.upload("files/file-1.data", parts(1))
    for left in (3, 2):
        await files.tidy()
        assert len(await store.names("files")) == left
    assert await files.get(kept.id, "")


async def test_other_tenants_do_not_use_a_tenants_limit(files: Files) -> None:
    limits = {"max_files": 1, "max_file_bytes": 5}
    await add(files, 5, "acme", limits)
    await add(files, 5, "other", limits)


async def test_files_expire(files: Files, store: Folder) -> None:
    gone = await add(files, ttl_s=0)
    kept = await add(files, ttl_s=1000)
    with pytest.raises(ApiError, match="expired"):
        await files.get(gone.id, "")
    assert [file.id for file in await files.listed("")] == [kept.id]
    await files.delete_expired()
    assert len(await store.names("files")) == 2


async def test_another_router_sees_what_one_router_deletes(store: Folder, files: Files) -> None:
    other = Files(store, max_file_bytes=100, quota_bytes=1000)
    file = await add(files)
    assert await other.get(file.id, "")
    await files.delete(file)
    with pytest.raises(ApiError):
        await other.get(file.id, "")
    assert await other.listed("") == []


async def test_a_batch_belongs_to_its_tenant(files: Files, batches: Batches) -> None:
    file = await add(files, tenant="acme")
    acme = Caller("acme", frozenset({"use"}), "salt", priority="interactive")
    body = BatchBody(input_file_id=file.id, endpoint=CHAT)
    batch = await batches.create(body, acme)
    assert (batch.record.tenant, batch.record.priority) == ("acme", "interactive")
    assert [found.id for found in await batches.listed("acme")] == [batch.id]
    assert await batches.listed("other") == []
    for refused in (batches.get, batches.cancel):
        with pytest.raises(ApiError, match="No batch found"):
            await refused(batch.id, "other")
    with pytest.raises(ApiError, match="No such File"):
        await batches.create(body, Caller("other"))


async def test_a_tenant_has_a_limit_of_open_batches(
    files: Files, batches: Batches, store: Folder
) -> None:
    acme = Caller("acme", limits={"max_open_batches": 1})
    file = await add(files, tenant="acme")
    body = BatchBody(input_file_id=file.id, endpoint=CHAT)
    batch = await batches.create(body, acme)
    with pytest.raises(ApiError, match="1 batches that have not ended"):
        await batches.create(body, acme)
    state = BatchState(store, batch.id)
    run = await state.claim("router")
    assert run is not None
    await state.finish(run, "cancelled")
    await batches.create(body, acme)


async def test_results_cannot_be_deleted_while_their_batch_runs(
    files: Files, batches: Batches, store: Folder
) -> None:
    file = await add(files)
    batch = await batches.create(BatchBody(input_file_id=file.id, endpoint=CHAT), ANYONE)
    await batches.register_results(batch.record, "output")
    state = BatchState(store, batch.id)
    run = await state.claim("router")
    assert run is not None
    await state.append(run, "output", b"{}\n")
    output = await files.get(batch.record.output_file_id, "")
    assert output.bytes == 3
    with pytest.raises(ApiError, match="still runs"):
        await files.delete(output)
    await state.finish(run, "completed")
    await files.delete(output)
    assert await files.listed("") == [file]


async def test_a_file_that_is_described_wrongly_is_not_kept(files: Files, store: Folder) -> None:
    def refuse() -> FileUpload:
        raise ApiError(400, "no purpose")

    with pytest.raises(ApiError, match="no purpose"):
        await files.add(parts(5), refuse, ANYONE)
    assert await store.names("files") == []


async def test_batches_without_results_are_forgotten_after_a_long_time(
    files: Files, batches: Batches, store: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = await add(files)
    created = [
        await batches.create(BatchBody(input_file_id=file.id, endpoint=CHAT), ANYONE)
        for _ in range(3)
    ]
    for batch in created[:2]:
        run = await BatchState(store, batch.id).claim("router")
        assert run is not None
        await BatchState(store, batch.id).finish(run, "completed")
    await batches.register_results(created[0].record, "output")
    await batches.delete_old()
    assert len(await batches.listed("")) == 3
    monkeypatch.setattr(batches_module, "FORGOTTEN_S", -10)
    await batches.delete_old()
    assert {batch.id for batch in await batches.listed("")} == {created[0].id, created[2].id}


async def test_the_oldest_ended_batches_of_the_largest_tenant_are_deleted_if_they_are_too_many(
    files: Files, batches: Batches, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches_module, "MAX_ENDED", 3)
    ids = dict[str, list[str]]()
    for tenant, count in (("small", 1), ("large", 5)):
        caller = Caller(tenant, frozenset({"use"}), "salt")
        file = await add(files, tenant=tenant)
        body = BatchBody(input_file_id=file.id, endpoint=CHAT)
        for number in range(count):
            monkeypatch.setattr(time, "time", lambda now=1e9 + number: now)
            batch = await batches.create(body, caller)
            ids.setdefault(tenant, []).append(batch.id)
            if number == 0:
                await batches.register_results(batch.record, "output")
            await batches.cancel(batch.id, tenant)
    await batches.delete_old()
    assert [batch.id for batch in await batches.listed("small")] == ids["small"]
    kept = {batch.id for batch in await batches.listed("large")}
    assert kept == {ids["large"][0], *ids["large"][2:]}
    with pytest.raises(ApiError, match="may have been deleted after its end"):
        await batches.get(ids["large"][1], "large")


@pytest.mark.parametrize(("window", "seconds"), [("24h", 86_400), ("90m", 5400), ("7d", 604_800)])
async def test_a_batch_has_a_window(
    files: Files, batches: Batches, window: str, seconds: int
) -> None:
    file = await add(files)
    body = BatchBody(input_file_id=file.id, endpoint=CHAT, completion_window=window)
    found = as_object(await batches.create(body, ANYONE))
    assert found["expires_at"] - found["created_at"] == seconds
    assert abs(found["created_at"] - time.time()) < 100
    assert found["status"] == "validating"


async def test_each_cluster_of_a_machine_sees_its_own_files_also_after_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder is the default one, which all clusters of a user share."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))

    def files_at(port: int) -> Files:
        cluster = cluster_id("host", port)
        service = batch_service(fake_base(cluster=cluster))
        assert isinstance(service, BatchService)
        return service.files

    file = await add(files_at(8000))
    assert await files_at(8001).listed("") == []
    assert [found.id for found in await files_at(8000).listed("")] == [file.id]


async def test_what_is_sent_twice_with_one_key_is_one_object(
    files: Files, batches: Batches, store: Folder
) -> None:
    ids, made = ["file-" + "1" * 32, "batch_" + "1" * 32], []
    upload = FileUpload("in.jsonl", "batch", ttl_s=None)
    for _ in range(2):
        file = await files.add(parts(5), lambda: upload, ANYONE, ids[0])
        body = BatchBody(input_file_id=file.id, endpoint=CHAT, metadata={"a": "b"})
        made.append((file, (await batches.create(body, ANYONE, ids[1])).record))
    assert made[0] == made[1]
    assert [each.id for each in made[0]] == ids
    assert len(await files.listed("")) == len(await batches.listed("")) == 1
    with pytest.raises(ApiError, match="was sent before, with a different request"):
        await files.add(parts(6), lambda: upload, ANYONE, ids[0])
    with pytest.raises(ApiError, match="was sent before, with a different request"):
        await batches.create(body.model_copy(update={"metadata": {}}), ANYONE, ids[1])
    assert [name for name in await store.names("files") if name.endswith(".data")]


async def test_a_failed_upload_leaves_the_file_of_its_repetition(files: Files) -> None:
    id_, is_added = "file-" + "1" * 32, asyncio.Event()
    upload = FileUpload("in.jsonl", "batch", ttl_s=None)

    async def broken() -> AsyncIterator[bytes]:
        yield b"12"
        await is_added.wait()
        raise ApiError(400, "the client has left")

    first = asyncio.create_task(files.add(broken(), lambda: upload, ANYONE, id_))
    await asyncio.sleep(0)
    record = await files.add(parts(5), lambda: upload, ANYONE, id_)
    is_added.set()
    with pytest.raises(ApiError, match="has left"):
        await first
    assert b"".join([chunk async for chunk in files.content(record, 0, 5)]) == b"xxxxx"


async def test_the_number_of_open_batches_of_the_cluster_is_limited(
    files: Files, batches: Batches, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches_module, "MAX_OPEN", 2)
    body = BatchBody(input_file_id=(await add(files)).id, endpoint=CHAT)
    first = await batches.create(body, ANYONE)
    await batches.create(body, ANYONE)
    with pytest.raises(ApiError, match="the cluster has 2 batches") as refused:
        await batches.create(body, ANYONE)
    assert refused.value.status == 429
    await batches.cancel(first.id, "")
    await batches.create(body, ANYONE)


async def test_a_list_reads_only_what_may_have_changed(
    store: Folder, files: Files, batches: Batches, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = BatchBody(input_file_id=(await add(files)).id, endpoint=CHAT)
    for _ in range(3):
        await batches.create(body, ANYONE)
    reads = []

    async def read(name: str) -> bytes:
        reads.append(name)
        return await Folder.read(store, name)

    monkeypatch.setattr(store, "read", read)
    assert len(await batches.listed("")) == 3
    assert reads == []
    assert await batches.listed("other") == []


async def test_the_number_of_files_of_the_cluster_is_limited(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files of 0 bytes would have no other limit."""
    monkeypatch.setattr(files_module, "MAX_FILES", 3)
    first = await add(files, 0)
    await files.check_room(ANYONE)  # the results of a batch are two files
    await add(files, 0, "acme")
    with pytest.raises(ApiError, match="more than 3"):
        await files.check_room(ANYONE)
    await add(files, 0)
    with pytest.raises(ApiError, match="more than 3") as refused:
        await add(files, 0)
    assert refused.value.status == 507
    await files.delete(first)
    await add(files, 0)
