"""A folder as a store of files: what is written is complete, and only its owner can read it."""

import asyncio
import errno
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvroute.files import folder
from kvroute.files.folder import UPLOADS, Folder
from kvroute.files.store import StoreFullError


@pytest.fixture
def store(tmp_path: Path) -> Folder:
    return Folder(tmp_path / "files")


async def parts(*data: bytes) -> AsyncIterator[bytes]:
    for part in data:
        yield part


async def content(store: Folder, name: str, start: int = 0, end: int = 1 << 30) -> bytes:
    return b"".join([chunk async for chunk in store.chunks(name, start, end)])


async def test_only_one_of_many_creates_a_file(store: Folder) -> None:
    texts = [b"%d" % number for number in range(20)]
    created = await asyncio.gather(*(store.create("a/b.json", text) for text in texts))
    assert created.count(True) == 1
    assert await store.read("a/b.json") == texts[created.index(True)]
    assert await store.names(UPLOADS) == []


async def test_parts_are_appended_and_read_by_range(store: Folder) -> None:
    for text in (b"abc", b"", b"defg"):
        await store.append("x", text)
    assert await store.size("x") == 7
    assert await content(store, "x", 2, 5) == b"cde"
    assert await content(store, "x", 5) == b"fg"
    await store.replace("x", b"new")
    assert await store.read("x") == b"new"


async def test_what_is_missing_is_empty(store: Folder) -> None:
    assert await store.size("missing") == 0
    assert await store.names("missing") == []
    await store.delete("missing")
    with pytest.raises(FileNotFoundError):
        await store.read("missing")


async def test_an_upload_that_fails_leaves_no_file(store: Folder) -> None:
    async def broken() -> AsyncIterator[bytes]:
        yield b"half"
        raise ValueError("broken")

    assert await store.upload("good", parts(b"ab", b"c")) == 3
    with pytest.raises(ValueError, match="broken"):
        await store.upload("bad", broken())
    assert await store.size("bad") == 0
    assert await store.names(UPLOADS) == []


async def test_only_the_owner_can_read_files(store: Folder) -> None:
    await store.create("a/created", b"x")
    await store.append("a/appended", b"x")
    await store.upload("a/uploaded", parts(b"x"))
    for name in await store.names("a"):
        assert (store.root / "a" / name).stat().st_mode & 0o777 == 0o600
    assert (store.root / "a").stat().st_mode & 0o777 == 0o700


async def test_a_full_disk_has_an_error_of_its_own(
    store: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(file: int, data: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(folder, "_write", full)
    for writing in (store.create("a", b"x"), store.append("b", b"x"), store.replace("c", b"x")):
        with pytest.raises(StoreFullError, match="No space left"):
            await writing
    assert await store.names(UPLOADS) == []
    assert not await store.size("a")


async def test_a_folder_is_deleted_with_its_files(store: Folder) -> None:
    await store.create("batch/run-1.json", b"x")
    await store.delete("batch")
    assert await store.names("batch") == []
