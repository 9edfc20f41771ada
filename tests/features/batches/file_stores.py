"""How every place for files behaves: one suite for a folder and for a bucket."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from kvroute.features.batches.stores.file_store import FileStore

Behaviour = Callable[[FileStore], Awaitable[None]]


async def parts(*data: bytes) -> AsyncIterator[bytes]:
    for part in data:
        yield part


async def content(store: FileStore, name: str, start: int = 0, end: int = 1 << 30) -> bytes:
    return b"".join([chunk async for chunk in store.chunks(name, start, end)])


async def only_one_of_many_creates_a_file(store: FileStore) -> None:
    texts = [b"%d" % number for number in range(20)]
    created = await asyncio.gather(*(store.create("one/b.json", text) for text in texts))
    assert created.count(True) == 1
    assert await store.read("one/b.json") == texts[created.index(True)]


async def data_is_appended_and_read_by_range(store: FileStore) -> None:
    for text in (b"abc", b"defg", b"h"):
        await store.append("grown/x", text)
    assert await store.size("grown/x") == 8
    assert await content(store, "grown/x", 2, 5) == b"cde"
    assert await content(store, "grown/x", 5) == b"fgh"
    assert await store.names("grown") == ["x"]
    assert (await store.path_of("grown/x")).read_bytes() == b"abcdefgh"


async def many_appended_parts_are_read_in_order(store: FileStore) -> None:
    texts = [b"%d," % number for number in range(40)]
    for text in texts:
        await store.append("many", text)
    whole = b"".join(texts)
    assert await content(store, "many") == whole
    assert await content(store, "many", 7, 63) == whole[7:63]


async def a_released_file_can_be_read_again(store: FileStore) -> None:
    await store.create("released", b"abc")
    for _ in range(2):
        assert (await store.path_of("released")).read_bytes() == b"abc"
        await store.release("released")
    await store.append("folder/released", b"abc")
    for _ in range(2):
        await store.path_of("folder/released")
    await store.release("folder/released")
    assert (await store.path_of("folder/released")).read_bytes() == b"abc"
    await store.release("missing")


async def a_file_is_replaced(store: FileStore) -> None:
    for text in (b"old", b"newer"):
        await store.replace("replaced", text)
        assert await store.read("replaced") == text
        assert (await store.path_of("replaced")).read_bytes() == text


async def what_is_missing_is_empty(store: FileStore) -> None:
    assert await store.size("missing") == 0
    assert await store.names("missing") == []
    await store.delete("missing")
    with pytest.raises(FileNotFoundError):
        await store.read("missing")
    with pytest.raises(FileNotFoundError):
        await content(store, "missing")


async def an_upload_that_fails_leaves_no_file(store: FileStore) -> None:
    async def broken() -> AsyncIterator[bytes]:
        yield b"half"
        raise ValueError("broken")

    assert await store.upload("up/good", parts(b"ab", b"c")) == 3
    assert await store.read("up/good") == b"abc"
    with pytest.raises(ValueError, match="broken"):
        await store.upload("up/bad", broken())
    assert await store.size("up/bad") == 0
    assert await store.names("up") == ["good"]


async def a_large_file_is_read_in_parts(store: FileStore) -> None:
    data = bytes(range(256)) * (50_000)
    assert await store.upload("large", parts(data[:5_000_000], data[5_000_000:])) == len(data)
    assert await content(store, "large") == data
    assert await content(store, "large", 4_999_990, 5_000_010) == data[4_999_990:5_000_010]


async def a_folder_is_deleted_with_its_files(store: FileStore) -> None:
    await store.create("batch/run-1.json", b"x")
    await store.append("batch/output-1.jsonl", b"x")
    await store.create("batch-2/run-1.json", b"x")
    assert sorted(await store.names("batch")) == ["output-1.jsonl", "run-1.json"]
    await store.delete("batch/output-1.jsonl")
    assert await store.names("batch") == ["run-1.json"]
    await store.delete("batch")
    assert await store.names("batch") == []
    assert await store.names("batch-2") == ["run-1.json"]


BEHAVIOURS: tuple[Behaviour, ...] = (
    only_one_of_many_creates_a_file,
    data_is_appended_and_read_by_range,
    many_appended_parts_are_read_in_order,
    a_released_file_can_be_read_again,
    a_file_is_replaced,
    what_is_missing_is_empty,
    an_upload_that_fails_leaves_no_file,
    a_large_file_is_read_in_parts,
    a_folder_is_deleted_with_its_files,
)
