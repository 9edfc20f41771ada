"""Files of blocks, one for each block, in a folder that several replicas may share.

    FOLDER/FORMAT/                 the blocks of one format (block_format.py)
    FOLDER/FORMAT/.lock            locked by the processes that use the format
    FOLDER/FORMAT/new/             files that are being written
    FOLDER/FORMAT/ab/KEY-FP.kv     a block: its key and its fingerprint, both in hexadecimal digits

A file has a header with a checksum, and the block's row. The checksum also covers the format and
the file's name. Files appear by renaming, so nobody sees a part of a file. They are not synced:
after a power failure, a file may have other bytes than were written, and is ignored.
"""

import contextlib
import fcntl
import logging
import os
import re
import secrets
import shutil
import stat
import struct
import time
from collections.abc import Callable, Iterator
from io import FileIO
from pathlib import Path
from tempfile import TemporaryFile
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

from kvroute.blocks.fingerprint import Fingerprint
from kvroute.replica.fabric.protocol import Key, Row

log = logging.getLogger("kvroute.replica")

HEADER = struct.Struct("<8sQ")  # MAGIC and the checksum
MAGIC = b"kvblock1"
NAME = re.compile(r"((?:[0-9a-f]{2}){8,100})-([0-9a-f]{16})\.kv")
FORMAT_NAME = re.compile(r"[0-9a-f]{32}")
LOCK, NEW = ".lock", "new"


class UnsafeFolderError(OSError):
    """Other users may change the folder's files."""


class StoredBlock(NamedTuple):
    """A block that has a file."""

    key: Key
    fingerprint: Fingerprint


class Survey(NamedTuple):
    """What a folder has."""

    blocks: list[StoredBlock]  # this format's blocks, the least recently used one first
    others_bytes: int  # size of the files of other formats that some process uses


class BlockFiles:
    """The files of one format's blocks."""

    def __init__(self, folder: Path, format_: str, row_bytes: int) -> None:
        """Open the folder, and create what is missing.

        Args:
            folder: the folder for all formats.
            format_: the format of the engine's blocks.
            row_bytes: the size of each block's row.

        Raises:
            OSError: the folder cannot be used.
        """
        self.file_bytes = HEADER.size + row_bytes
        self._folder, self._format = folder, format_.encode()
        self._own = folder / format_[:32]
        self._create()
        _check_owner(self._own)
        self._lock = os.open(self._own / LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_SH)

    def _create(self) -> None:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._own.mkdir(mode=0o700, exist_ok=True)
        (self._own / NEW).mkdir(mode=0o700, exist_ok=True)

    def close(self) -> None:
        """Release the format's lock."""
        os.close(self._lock)

    def survey(self, max_bytes: int) -> Survey:
        """List the blocks, and delete what nobody uses.

        Files of formats that no process uses are deleted, the oldest first, while all files take
        more than `max_bytes`. So are files that a process did not finish.
        """
        self._create()  # somebody may have deleted the folder
        self._remove_unfinished()
        blocks = sorted(self._blocks(self._own))
        used_bytes, unused = 0, []
        for other in self._other_formats():
            with _free_lock(other) as is_free:
                sizes = [(used_s, path) for used_s, path, _ in self._blocks(other)]
                if is_free:
                    unused += sizes
                else:
                    used_bytes += sum(map(_size, (path for _, path in sizes)))
        total = len(blocks) * self.file_bytes + used_bytes
        unused.sort(reverse=True)
        for _, path in unused:
            total += _size(path)
            if total > max_bytes:
                _remove(path)
        return Survey([block for _, _, block in blocks], used_bytes)

    def write(
        self, block: StoredBlock, row: Row, appear: Callable[[Callable[[], object]], object]
    ) -> None:
        """Write a block's file, unless it exists.

        Args:
            block: the block.
            row: its row, which must not change meanwhile.
            appear: gets a function that makes the file appear, and decides whether to call it.

        Raises:
            OSError: the file cannot be written, for example because the disk is full.
        """
        path = self._path(block)
        if path.exists():
            return
        new = self._own / NEW / secrets.token_hex(16)
        try:
            with _locked_file(new) as file:
                _write(file.fileno(), HEADER.pack(MAGIC, self._checksum(block, row)), row.data)
                path.parent.mkdir(mode=0o700, exist_ok=True)
                appear(lambda: new.rename(path))
        finally:
            _remove(new)

    def read(self, block: StoredBlock, into: Row) -> bool:
        """Read a block's row, and return whether the file exists and is whole.

        A damaged file is deleted.

        Raises:
            OSError: the disk has failed.
        """
        path = self._path(block)
        try:
            with path.open("rb", buffering=0) as file:
                is_whole = os.fstat(file.fileno()).st_size == self.file_bytes and (
                    self._fill(file.fileno(), block, into)
                )
        except FileNotFoundError:
            return False
        if not is_whole:
            log.warning("deleted the file %s, which is damaged", path)
            _remove(path)
            return False
        with contextlib.suppress(OSError):
            os.utime(path)  # the next survey finds when the block was used
        return True

    def _fill(self, fd: int, block: StoredBlock, into: Row) -> bool:
        """Read a file into a row, and return whether it is the block's."""
        header = bytearray(HEADER.size)
        for part in (memoryview(header), into.data):
            rest = part
            while rest:
                count = os.readv(fd, [rest])
                if not count:
                    return False
                rest = rest[count:]
        return HEADER.unpack(header) == (MAGIC, self._checksum(block, into))

    def remove(self, block: StoredBlock) -> None:
        """Delete a block's file, if it exists."""
        _remove(self._path(block))

    def clear(self) -> Path:
        """Remove all blocks; return a folder that the caller should delete."""
        trash = self._own / NEW / secrets.token_hex(16)
        trash.mkdir(mode=0o700)
        for part in self._parts(self._own):
            with contextlib.suppress(OSError):
                part.rename(trash / part.name)
        return trash

    def _path(self, block: StoredBlock) -> Path:
        key = block.key.hex()
        return self._own / key[:2] / f"{key}-{block.fingerprint:016x}.kv"

    def _checksum(self, block: StoredBlock, row: Row) -> int:
        seed = xxh3_64_intdigest(self._format + block.key, seed=block.fingerprint)
        return xxh3_64_intdigest(row.data, seed=seed)

    def _other_formats(self) -> Iterator[Path]:
        for path in self._folder.iterdir():
            if FORMAT_NAME.fullmatch(path.name) and path != self._own and path.is_dir():
                yield path

    def _blocks(self, folder: Path) -> Iterator[tuple[float, Path, StoredBlock]]:
        """Yield the blocks of a format, with the time of the last use and the path."""
        for part in self._parts(folder):
            with contextlib.suppress(OSError), os.scandir(part) as entries:
                for entry in entries:
                    if name := NAME.fullmatch(entry.name):
                        block = StoredBlock(
                            bytes.fromhex(name[1]), Fingerprint(int(name[2], base=16))
                        )
                        with contextlib.suppress(OSError):
                            yield entry.stat().st_mtime, Path(entry.path), block

    def _parts(self, folder: Path) -> Iterator[Path]:
        with contextlib.suppress(OSError):
            for path in folder.iterdir():
                if re.fullmatch("[0-9a-f]{2}", path.name):
                    yield path

    def _remove_unfinished(self) -> None:
        """Delete the files that a process began to write and left, because it was killed."""
        for path in (self._own / NEW).iterdir():
            if path.is_dir():  # from an interrupted `clear`
                shutil.rmtree(path, ignore_errors=True)
                continue
            with contextlib.suppress(OSError), path.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove(path)


def measured_bytes_per_s(folder: Path, size: int) -> float:
    """Measure how fast a disk reads a file of this size that is not in the page cache.

    Raises:
        OSError: the folder cannot be written.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with TemporaryFile(dir=folder, buffering=0) as file:
        _write(file.fileno(), bytes(size))
        os.fsync(file)
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        began_s = time.perf_counter()
        os.pread(file.fileno(), size, 0)
        return size / max(1e-9, time.perf_counter() - began_s)


def _locked_file(path: Path) -> FileIO:
    """Create a file and lock it, so that no process takes it for unfinished."""
    while True:
        file = FileIO(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600), "r+")
        fcntl.flock(file, fcntl.LOCK_EX)
        if os.fstat(file.fileno()).st_nlink:
            return file
        file.close()  # another process has deleted it before it was locked


def _write(fd: int, *parts: bytes | memoryview) -> None:
    """Write all parts. Raises OSError, for example if the disk is full."""
    for part in parts:
        rest = memoryview(part)
        while rest:
            rest = rest[os.write(fd, rest) :]


def _check_owner(folder: Path) -> None:
    status = folder.stat()
    if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise UnsafeFolderError(
            f"{folder} is not owned by this user, or others may read it; choose another folder"
        )


@contextlib.contextmanager
def _free_lock(folder: Path) -> Iterator[bool]:
    """Hold the lock of another format if no process uses the format; yield whether it is held."""
    try:
        fd = os.open(folder / LOCK, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        yield False
        return
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
        else:
            yield True
    finally:
        os.close(fd)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()
