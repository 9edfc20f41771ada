"""Uploaded adapters are copied to machines that lack them: whole, or not at all."""

import os
import time
from pathlib import Path

import pytest

from kvroute.adapters.files import digest_of
from kvroute.adapters.uploads import FILES, UNUSED_S, UploadedAdapters
from kvroute.replica import adapter_copies
from kvroute.replica.adapter_copies import AdapterCopies
from tests.support.adapters import write_adapter


@pytest.fixture
def there(tmp_path: Path) -> UploadedAdapters:
    return UploadedAdapters(tmp_path / "there", "cluster/1", "org/model")


@pytest.fixture
def here(tmp_path: Path) -> UploadedAdapters:
    return UploadedAdapters(tmp_path / "here", "cluster/1", "org/model")


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_copies, "RETRY_S", 0.0)
    monkeypatch.setattr(adapter_copies, "PART_BYTES", 10_000)


async def uploaded(uploads: UploadedAdapters, seed: int = 0) -> str:
    async with uploads.arriving() as folder:
        write_adapter(folder, seed=seed)
        return uploads.keep(folder)


def names(uploads: UploadedAdapters) -> list[str]:
    return sorted(os.listdir(uploads.folder)) if uploads.folder.exists() else []


async def test_a_machine_that_lacks_an_adapter_copies_it(
    there: UploadedAdapters, here: UploadedAdapters
) -> None:
    digest, reads = await uploaded(there), 0

    async def read(*part: object) -> bytes | None:
        nonlocal reads
        reads += 1
        if reads % 3 == 0:
            raise ConnectionError("this router ends")
        return None if reads % 3 == 1 else there.read(*part)  # type: ignore[arg-type]

    copies = AdapterCopies(here, read)
    path = str(here.folder / digest)
    await copies.ensure(path)
    assert digest_of(Path(path)) == digest
    assert names(here) == [digest]
    before = reads
    await copies.ensure(path)
    assert reads == before  # it has the adapter now


async def test_wrong_bytes_are_not_kept(there: UploadedAdapters, here: UploadedAdapters) -> None:
    digest = await uploaded(there)

    async def read(digest: str, name: str, start: int, size: int) -> bytes | None:
        part = there.read(digest, name, start, size)
        return part and part[:-1] + b"?"

    with pytest.raises(ValueError, match="have changed"):
        await AdapterCopies(here, read).ensure(str(here.folder / digest))
    assert digest not in names(here)
    assert not any(name.endswith(".part") for name in names(here))


async def test_files_that_no_router_has_are_reported(here: UploadedAdapters) -> None:
    async def read(*_: object) -> None:
        return None

    with pytest.raises(ValueError, match=r"no router has them; upload them again"):
        await AdapterCopies(here, read).ensure(str(here.folder / ("0" * 32)))
    assert names(here) == []


async def test_only_uploaded_adapters_are_copied(here: UploadedAdapters, tmp_path: Path) -> None:
    async def read(*_: object) -> bytes | None:
        raise AssertionError

    await AdapterCopies(here, read).ensure(str(tmp_path / "here" / "sql"))


async def test_equal_files_are_one_adapter(there: UploadedAdapters) -> None:
    first, same, other = [await uploaded(there, seed) for seed in (0, 0, 1)]
    assert first == same != other
    assert names(there) == sorted([first, other])


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "adapter_model.bin", ""])
async def test_other_files_cannot_be_read(there: UploadedAdapters, name: str) -> None:
    digest = await uploaded(there)
    assert there.read(digest, name, 0, 10) is None
    assert there.read("../..", FILES[0], 0, 10) is None


async def test_what_no_adapter_uses_is_deleted_after_an_hour(there: UploadedAdapters) -> None:
    used, unused, new = [await uploaded(there, seed) for seed in range(3)]
    stopped = there.folder / "stopped.part"  # left by a process that died during an upload
    stopped.mkdir()
    old = time.time() - UNUSED_S - 1
    for name in (used, unused, stopped.name):
        os.utime(there.folder / name, (old, old))
    there.tidy([used])
    assert names(there) == sorted([used, new])


def test_models_and_clusters_are_kept_apart(tmp_path: Path) -> None:
    folders = {
        UploadedAdapters(tmp_path, cluster, model).folder
        for cluster in ("a", "b", "a/b")
        for model in ("m", "m/n", "b/m")
    }
    assert len(folders) == 9
