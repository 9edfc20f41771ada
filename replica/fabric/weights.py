"""The digest of a model's weights: replicas share blocks only if theirs are equal.

Checkpoints may differ in any byte, so all bytes are hashed. This takes minutes for hundreds of
gigabytes, so it happens in the background and once per machine: the digest of a file is kept in the
state folder, beside the file's size, times and inode.
"""

import asyncio
import contextlib
import fcntl
import hashlib
import json
import logging
import os
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO

import msgspec

from kvroute.contract.adapters import Adapter, digests
from kvroute.contract.unreadable import DECODE_ERRORS
from kvroute.process.state_folder import state_folder

log = logging.getLogger("kvroute.replica")

CONFIG = "config.json"
PATTERNS = (CONFIG, "*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.tensors")
CHUNK_BYTES = 1 << 20  # bytes that are read at once
WAIT_S = 0.5  # seconds between two looks whether another process has hashed a file


class Signature(msgspec.Struct, frozen=True):
    """What changes when somebody writes to a file or replaces it."""

    size: int
    inode: int
    modified_ns: int
    changed_ns: int  # time of the last change of the inode, which programs cannot set

    @classmethod
    def of(cls, status: os.stat_result) -> "Signature":
        return cls(status.st_size, status.st_ino, status.st_mtime_ns, status.st_ctime_ns)


class UnknownWeightsError(Exception):
    """Nobody knows which weights the engine has loaded."""


class _Kept(msgspec.Struct):
    """What the state folder has about a file."""

    signature: Signature
    digest: str


class Weights:
    """The weights of one engine, and their digest as soon as it is known."""

    def __init__(
        self,
        model: str,
        revision: str = "",
        *,
        adapters: Iterable[Adapter] = (),
        cache: str | None = None,
        are_random: bool = False,
    ) -> None:
        """Note which files the weights have. Call this before the engine reads them.

        Args:
            model: a folder, a file, or a name on the Hugging Face hub.
            revision: the revision on the hub; empty: the default revision.
            adapters: the LoRA adapters that the model is served with.
            cache: the folder with models from the hub; None: the default folder.
            are_random: whether the engine makes weights up, so that the model needs no files.
        """
        self._model, self._revision, self._cache = model, revision, cache
        self._adapters, self._are_random = adapters, are_random
        self._files = self._found()
        self._stopped = threading.Event()
        self._hashing: asyncio.Task[str] | None = None

    def start(self) -> None:
        """Start to find out the digest. Call this when the engine has read the weights."""
        self._files = self._files or self._found()  # the engine may have downloaded them
        self._hashing = asyncio.create_task(asyncio.to_thread(self._known))

    def stop(self) -> None:
        self._stopped.set()

    @property
    def digest(self) -> str | None:
        """Return the digest; None: it is not known yet. Empty: it cannot be known."""
        return self._hashing.result() if self._hashing and self._hashing.done() else None

    async def known(self) -> str:
        """Wait until the digest is known; return "" if it cannot be known."""
        assert self._hashing
        return await asyncio.shield(self._hashing)

    def _known(self) -> str:
        try:
            return self.computed()
        except (UnknownWeightsError, OSError) as error:
            if not self._stopped.is_set():
                log.warning("pulls from other replicas and the disk cache are off: %s", error)
            return ""

    def computed(self) -> str:
        """Return the digest. This reads each file that no process of this machine has hashed.

        Raises:
            UnknownWeightsError: the files are missing, or may not be those that the engine has
                read.
            OSError: the files cannot be read.
        """
        if not (self._are_random or any(file.name != CONFIG for file in self._files)):
            raise UnknownWeightsError(
                f"the weights of {self._model} are not on this machine as files; give --model a "
                "folder that has them"
            )
        named = {file.name: self._hashed(file, seen) for file, seen in self._files.items()}
        for file, seen in self._files.items():
            if Signature.of(file.stat()) != seen:
                raise UnknownWeightsError(
                    f"{file} has changed since the engine began to read it; restart the replica"
                )
        facts = [named, digests(self._adapters)]
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()

    def _found(self) -> Mapping[Path, Signature]:
        """Return the files of the weights that are on this machine."""
        place = Path(self._model)
        if not place.exists():
            from huggingface_hub import try_to_load_from_cache

            try:
                config = try_to_load_from_cache(
                    self._model, CONFIG, cache_dir=self._cache, revision=self._revision or None
                )
            except ValueError:  # an address of a bucket, for example
                return {}
            if not isinstance(config, str):
                return {}
            place = Path(config).parent
        files = {file for pattern in PATTERNS for file in place.glob(pattern)}
        paths = files if place.is_dir() else {place}
        return {path: Signature.of(path.stat()) for path in sorted(paths) if path.is_file()}

    def _hashed(self, path: Path, seen: Signature) -> str:
        """Return the digest of a file, which is kept from now on."""
        try:
            folder = state_folder() / "weights"
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            name = hashlib.sha256(os.fsencode(path.absolute())).hexdigest()[:32]
            fd = os.open(folder / name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            log.info("digests of weights are computed at each start: %s cannot be used", error)
            return self._read(path)
        with os.fdopen(fd, "r+b") as record:
            self._lock(record)
            with contextlib.suppress(*DECODE_ERRORS):
                kept = msgspec.json.decode(record.read(), type=_Kept)
                if kept.signature == seen:
                    return kept.digest
            digest = self._read(path)
            with contextlib.suppress(OSError):  # the disk may be full
                record.seek(0)
                record.truncate()
                record.write(msgspec.json.encode(_Kept(seen, digest)))
            return digest

    def _lock(self, record: IO[bytes]) -> None:
        """Wait while another process hashes the same file."""
        while not self._stopped.is_set():
            try:
                return fcntl.flock(record, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self._stopped.wait(WAIT_S)
        raise UnknownWeightsError("the replica stops")

    def _read(self, path: Path) -> str:
        digest, buffer = hashlib.sha256(), memoryview(bytearray(CHUNK_BYTES))
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(buffer):
                if self._stopped.is_set():
                    raise UnknownWeightsError("the replica stops")
                digest.update(buffer[:count])
        return digest.hexdigest()
