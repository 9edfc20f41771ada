"""Places for files: what is written is complete, and only its owner can read it.

The first tests hold for a folder and for a bucket; tests/slow/suites/test_s3.py runs them on S3.
"""

import asyncio
import errno
import gc
import os
import shutil
import threading
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
from obstore.store import MemoryStore

from kvroute.features.batches.stores import folder
from kvroute.features.batches.stores.bucket import Bucket
from kvroute.features.batches.stores.file_store import FileStore, StoreFullError
from kvroute.features.batches.stores.folder import UPLOADS, Folder
from tests.features.batches import file_stores
from tests.support.waiting import until


@pytest.fixture
def own_folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path / "files")


@pytest.fixture(params=["folder", "bucket"])
def store(request: pytest.FixtureRequest, own_folder: Folder, tmp_path: Path) -> FileStore:
    return own_folder if request.param == "folder" else Bucket(MemoryStore(), tmp_path / "local")


@pytest.mark.parametrize("behaviour", file_stores.BEHAVIOURS, ids=lambda test: test.__name__)
async def test_every_place_behaves_alike(
    store: FileStore, behaviour: file_stores.Behaviour
) -> None:
    await behaviour(store)


async def test_a_folder_keeps_nothing_of_what_failed(own_folder: Folder) -> None:
    for behaviour in file_stores.BEHAVIOURS:
        await behaviour(own_folder)
    assert await own_folder.names(UPLOADS) == []


async def test_only_the_owner_can_read_files(own_folder: Folder) -> None:
    await own_folder.create("a/created", b"x")
    await own_folder.append("a/appended", b"x")
    await own_folder.upload("a/uploaded", file_stores.parts(b"x"))
    for name in await own_folder.names("a"):
        assert (own_folder.root / "a" / name).stat().st_mode & 0o777 == 0o600
    assert (own_folder.root / "a").stat().st_mode & 0o777 == 0o700


async def test_a_full_disk_has_an_error_of_its_own(
    own_folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(file: object, data: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(folder._OpenFile, "write", full)
    calls = (
        own_folder.create("a", b"x"),
        own_folder.append("b", b"x"),
        own_folder.replace("c", b"x"),
    )
    for writing in calls:
        with pytest.raises(StoreFullError, match="No space left"):
            await writing
    assert await own_folder.names(UPLOADS) == []
    assert not await own_folder.size("a")


async def test_a_cancelled_write_goes_on_in_its_own_file(
    own_folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, may_end, written = threading.Event(), threading.Event(), threading.Event()

    def slow(file: int, data: memoryview) -> int:
        begun.set()
        may_end.wait()
        try:
            return write(file, data)
        finally:
            written.set()

    write = os.write
    monkeypatch.setattr(os, "write", slow)
    uploading = asyncio.create_task(own_folder.upload("a", file_stores.parts(b"of the upload")))
    await asyncio.to_thread(begun.wait)
    uploading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await uploading
    others = [os.open(own_folder.root / f"other-{i}", os.O_RDWR | os.O_CREAT) for i in range(20)]
    may_end.set()
    await asyncio.to_thread(written.wait)
    assert [os.pread(other, 100, 0) for other in others] == [b""] * len(others)
    assert await own_folder.names(UPLOADS) == []
    for other in others:
        os.close(other)


async def test_the_space_of_a_broken_upload_is_free_without_garbage_collection(
    own_folder: Folder,
) -> None:
    async def broken() -> AsyncIterator[bytes]:
        yield b"x"
        raise ConnectionError

    def still_open() -> list[str]:
        return [path for path in open_paths() if path.startswith(str(own_folder.root))]

    gc.disable()
    try:
        kept = []  # tracebacks refer to the frames of the uploads, and so to their files
        for _ in range(3):
            try:
                await own_folder.upload("a", broken())
            except ConnectionError as error:
                kept.append(error)
        await own_folder.upload("b", file_stores.parts(b"xy"))
        assert [part async for part in own_folder.chunks("b", 0, 2)] == [b"xy"]
        await until(lambda: not still_open())
    finally:
        gc.enable()


def open_paths() -> list[str]:
    """Return the paths of this process's open files, also of deleted ones."""
    found = []
    for link in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            found.append(os.readlink(link))
    return found


async def test_an_upload_that_a_crash_has_left_is_deleted_a_day_later(own_folder: Folder) -> None:
    old, new = (own_folder.root / UPLOADS / name for name in ("old", "new"))
    for path in (old, new):
        path.touch()
    day_before_yesterday = time.time() - 2 * 86_400
    os.utime(old, (day_before_yesterday, day_before_yesterday))
    await own_folder.tidy()
    assert await own_folder.names(UPLOADS) == ["new"]


async def test_a_bucket_keeps_a_copy_while_it_is_used(tmp_path: Path) -> None:
    bucket = Bucket(MemoryStore(), tmp_path / "local")
    await bucket.create("a", b"abc")
    path = await bucket.path_of("a")
    assert await bucket.path_of("a") == path
    await bucket.release("a")
    assert path.read_bytes() == b"abc"
    await bucket.release("a")
    assert not path.exists()
    index = await bucket.path_of("b/index")
    index.mkdir()
    (index / "lines").touch()
    await bucket.release("b/index")
    assert not index.exists()


def test_the_used_space_is_counted_while_another_router_deletes(tmp_path: Path) -> None:
    store, is_over = Folder(tmp_path / "files"), threading.Event()

    def come_and_go() -> None:
        while not is_over.is_set():
            folder = store.root / "batches"
            for number in range(20):
                (folder / f"{number}").mkdir(parents=True, exist_ok=True)
                (folder / f"{number}/part").write_bytes(b"x")
            shutil.rmtree(folder)

    with ThreadPoolExecutor() as threads:
        going = threads.submit(come_and_go)
        try:
            assert all(store.used_bytes_now() <= 20 for _ in range(200))
        finally:
            is_over.set()
        going.result()
    store.close()
