"""Files of blocks: only whole and right blocks are read, whatever has happened to the disk."""

import errno
import fcntl
import multiprocessing
import os
import shutil
import signal
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvroute.blocks.fingerprint import Fingerprint
from kvroute.replica.fabric import block_files
from kvroute.replica.fabric.block_files import (
    BlockFiles,
    StoredBlock,
    UnsafeFolderError,
    measured_bytes_per_s,
)

ROW_BYTES = 3_000
FORMAT, OTHER = "a" * 64, "b" * 64
MUCH = 1 << 40


def block(number: int) -> StoredBlock:
    return StoredBlock(number.to_bytes(36, "little"), Fingerprint(number + 2**63))


def row(number: int) -> Any:
    return np.random.default_rng(number).integers(0, 256, ROW_BYTES, np.uint8)


def write(files: BlockFiles, *numbers: int) -> None:
    for number in numbers:
        files.write(block(number), row(number), lambda appear: appear())


def read(files: BlockFiles, number: int) -> bool:
    """Return whether a block can be read, and check that it is the right one."""
    into = np.zeros(ROW_BYTES, np.uint8)
    is_read = files.read(block(number), into)
    assert not is_read or (into == row(number)).all()
    return is_read


def blocks(files: BlockFiles) -> list[StoredBlock]:
    return files.survey(MUCH).blocks


def the_file(folder: Path) -> Path:
    (path,) = folder.rglob("*.kv")
    return path


@pytest.fixture
def files(tmp_path: Path) -> Iterator[BlockFiles]:
    files = BlockFiles(tmp_path / "cache", FORMAT, ROW_BYTES)
    yield files
    files.close()


def test_a_block_that_was_written_can_be_read_by_a_later_process(
    files: BlockFiles, tmp_path: Path
) -> None:
    write(files, 1, 2)
    later = BlockFiles(tmp_path / "cache", FORMAT, ROW_BYTES)
    assert set(blocks(later)) == {block(1), block(2)}
    assert read(later, 1)
    assert read(later, 2)
    assert not read(later, 3)
    later.close()


def test_blocks_are_listed_in_the_order_of_their_last_use(files: BlockFiles) -> None:
    write(files, 1, 2, 3)
    for number, used_s in ((1, 30), (2, 20), (3, 10)):
        os.utime(files._path(block(number)), (used_s, used_s))
    assert blocks(files) == [block(3), block(2), block(1)]
    assert read(files, 3)
    assert blocks(files)[-1] == block(3)


def test_other_users_cannot_read_the_files(files: BlockFiles, tmp_path: Path) -> None:
    write(files, 1)
    for path in (tmp_path / "cache").rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600)


def test_a_folder_that_others_can_change_is_refused(files: BlockFiles, tmp_path: Path) -> None:
    files._own.chmod(0o777)
    with pytest.raises(UnsafeFolderError, match="choose another folder"):
        BlockFiles(tmp_path / "cache", FORMAT, ROW_BYTES)


@given(data=st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_damaged_file_is_never_used(files: BlockFiles, tmp_path: Path, data: Any) -> None:
    shutil.rmtree(files.clear())
    write(files, 1)
    path = the_file(tmp_path)
    content = bytearray(path.read_bytes())
    match data.draw(st.sampled_from(["bit", "cut", "longer", "other"])):
        case "bit":
            content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(
                st.integers(0, 7)
            )
        case "cut":
            del content[data.draw(st.integers(0, len(content) - 1)) :]
        case "longer":
            content += data.draw(st.binary(min_size=1, max_size=9))
        case "other":
            content[:] = data.draw(st.binary(max_size=99))
    path.write_bytes(content)
    assert not read(files, 1)
    assert not path.exists()
    write(files, 1)
    assert read(files, 1)


def test_a_file_under_another_name_or_of_another_format_is_not_used(
    files: BlockFiles, tmp_path: Path
) -> None:
    write(files, 1)
    renamed = files._path(block(2))
    renamed.parent.mkdir(exist_ok=True)
    files._path(block(1)).rename(renamed)
    assert not read(files, 2)
    write(files, 1)
    other = BlockFiles(tmp_path / "cache", OTHER, ROW_BYTES)
    other._path(block(1)).parent.mkdir(exist_ok=True)
    files._path(block(1)).rename(other._path(block(1)))
    assert not read(other, 1)
    other.close()


def test_foreign_files_are_left_alone(files: BlockFiles, tmp_path: Path) -> None:
    write(files, 1)
    foreign = [
        tmp_path / "cache" / "mine.txt",
        files._own / "00" / "mine.kv",
        files._own / "mine",
        files._path(block(1)).parent / "deadbeef.kv",
        files._path(block(1)).parent / f"{'a' * 15}-{'b' * 16}.kv",
    ]
    for path in foreign:
        path.parent.mkdir(exist_ok=True)
        path.write_text("mine")
    assert blocks(files) == [block(1)]
    assert all(path.read_text() == "mine" for path in foreign)


def test_a_folder_that_was_deleted_is_created_again(files: BlockFiles, tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / "cache")
    with pytest.raises(OSError, match="No such file"):
        write(files, 1)
    assert blocks(files) == []
    write(files, 1)
    assert read(files, 1)


def test_a_clear_deletes_all_blocks(files: BlockFiles) -> None:
    write(files, *range(20))
    shutil.rmtree(files.clear())
    assert blocks(files) == []
    assert not read(files, 1)
    write(files, 1)
    assert read(files, 1)


def test_a_block_that_is_no_longer_wanted_does_not_appear(files: BlockFiles) -> None:
    files.write(block(1), row(1), lambda _: None)
    assert blocks(files) == []


@pytest.mark.parametrize("after", [0, 16, 100])
def test_a_full_disk_leaves_nothing_behind(
    files: BlockFiles, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    really, written = os.write, 0

    def full(fd: int, data: memoryview) -> int:
        nonlocal written
        if written >= after:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        count = really(fd, data[: after - written])
        written += count
        return count

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space"):
        write(files, 1)
    monkeypatch.undo()
    assert blocks(files) == []
    assert list((files._own / block_files.NEW).iterdir()) == []
    write(files, 1)
    assert read(files, 1)


def _write_and_die(folder: Path, call: str) -> None:
    """Write a block, and die instead of calling a function of `os` or `Path`."""
    import pathlib

    files = BlockFiles(folder, FORMAT, ROW_BYTES)

    def die(*_: object, **__: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    where, _, name = call.partition(".")
    setattr({"os": os, "path": pathlib.Path, "fcntl": fcntl}[where], name, die)
    write(files, 1)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    "call", ["fcntl.flock", "os.write", "path.mkdir", "path.rename", "path.unlink", "os.chmod"]
)
def test_a_kill_between_two_steps_leaves_a_whole_block_or_none(
    files: BlockFiles, tmp_path: Path, call: str
) -> None:
    process = multiprocessing.get_context("fork").Process(
        target=_write_and_die, args=(tmp_path / "cache", call)
    )
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    found = blocks(files)
    assert found in ([], [block(1)])
    assert read(files, 1) == bool(found)
    assert list((files._own / block_files.NEW).iterdir()) == []
    write(files, 1)
    assert read(files, 1)


def test_a_file_is_not_taken_for_unfinished_before_it_is_locked(
    files: BlockFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    really, surveys = fcntl.flock, 0

    def flock(file: Any, how: int) -> None:
        nonlocal surveys
        if how == fcntl.LOCK_EX and not surveys:
            surveys += 1
            files.survey(MUCH)
        really(file, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    write(files, 1)
    assert read(files, 1)


def test_formats_that_nobody_uses_are_deleted_when_space_is_needed(
    files: BlockFiles, tmp_path: Path
) -> None:
    write(files, 1, 2)
    other = BlockFiles(tmp_path / "cache", OTHER, ROW_BYTES)
    write(other, 1, 2, 3)
    used = files.survey(max_bytes=0)
    assert used.others_bytes == 3 * other.file_bytes
    for number, used_s in ((1, 10), (2, 30), (3, 20)):
        os.utime(other._path(block(number)), (used_s, used_s))
    other.close()
    assert files.survey(5 * files.file_bytes).others_bytes == 0
    again = BlockFiles(tmp_path / "cache", OTHER, ROW_BYTES)
    assert len(blocks(again)) == 3
    again.close()
    files.survey(3 * files.file_bytes)
    again = BlockFiles(tmp_path / "cache", OTHER, ROW_BYTES)
    assert blocks(again) == [block(2)]
    again.close()
    assert len(blocks(files)) == 2


def test_the_speed_of_the_disk_is_measured(tmp_path: Path) -> None:
    assert measured_bytes_per_s(tmp_path / "cache", ROW_BYTES) > 0
    assert list((tmp_path / "cache").iterdir()) == []
