"""The files of the Files API: uploaded files, and the results of batches."""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterable, AsyncIterator, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from kvroute.contract.records import encode
from kvroute.features.batches.batch_state import BatchState, read_record
from kvroute.features.batches.records import FILE_ID, FileRecord, Segment, new_file_id
from kvroute.features.batches.stores.file_store import FileStore
from kvroute.features.gate import Caller
from kvroute.router.api.errors import ApiError
from kvroute.router.endpoints.idempotency import reused
from kvroute.store.connection import SharedClock

log = logging.getLogger("kvroute.batches")

FOLDER = "files"
READ_AT_ONCE = 32  # records that are read from the store at the same time
# The most files of all tenants, results included. Each upload reads the list of their names.
MAX_FILES = 50_000
RESULTS = 2  # files with the results of a batch: its answers, and its errors
SPARE_SHARE = 0.05  # share of the quota that no upload may use: it is left for results


@dataclass(frozen=True, slots=True)
class FileUpload:
    """What a client says about a file."""

    filename: str
    purpose: str
    ttl_s: int | None  # seconds until it expires; None: it does not expire


class Files:
    """The files of all tenants.

    Records never change, so each router caches the ones that it has read.

    Args:
        store: where the files are.
        max_file_bytes: limit of one file.
        quota_bytes: limit of all files together.
        clock: tells when files and batches expire.
    """

    def __init__(
        self,
        store: FileStore,
        *,
        max_file_bytes: int,
        quota_bytes: int,
        clock: SharedClock | None = None,
    ) -> None:
        self.clock = clock or SharedClock()
        self._store = store
        self._max_file_bytes = max_file_bytes
        self._quota_bytes = quota_bytes
        self._records: dict[str, FileRecord] = {}
        self._sizes: dict[str, int] = {}  # file with the results of a batch that has ended -> bytes
        self._unrecorded: set[str] = set()  # contents that had no record at the last `tidy`
        self._adding = asyncio.Lock()  # only one upload at a time checks the limits at its end
        self._uploading = Counter[str]()  # bytes of running uploads, by tenant

    async def add(
        self,
        parts: AsyncIterable[bytes],
        describe: Callable[[], FileUpload],
        caller: Caller,
        id_: str = "",
    ) -> FileRecord:
        """Store a file whose content arrives in parts.

        Args:
            parts: the content.
            describe: returns what the client says about the file; called after the last part. If
                it raises ApiError, the file is deleted.
            caller: the owner.
            id_: the file's id; empty: a new one. If there is such a file, it is returned.

        Raises:
            ApiError: the file is too large, a quota is exceeded, or there is another file with this
                id.
            OSError: the store cannot be used.
        """
        id_ = id_ or new_file_id()
        if (earlier := await self._read(id_)) is not None:
            if not self._is_expired(earlier):
                size = 0
                async for part in parts:
                    size += len(part)
                return _same(earlier, describe(), size)
            await self.delete(earlier)
        now = int(self.clock.now_s())
        bounded = await self._bounded(parts, caller, new_files=1)
        try:
            try:
                size = await self._store.upload(f"{FOLDER}/{id_}.data", bounded.chunks())
            finally:
                self._uploading[caller.tenant] -= bounded.size
            upload = describe()
            record = FileRecord(
                id_,
                caller.tenant,
                upload.filename,
                upload.purpose,
                created_at=now,
                expires_at=None if upload.ttl_s is None else now + upload.ttl_s,
                bytes=size,
            )
            async with self._adding:  # other uploads may have ended meanwhile
                now_used = await self._bounded(_nothing(), caller, new_files=1)
                now_used.used += size
                now_used.total += size
                now_used.check()
                is_new = await self.register(record)
        except BaseException:
            await asyncio.shield(self._discard(id_))
            raise
        earlier = None if is_new else await self._read(id_)
        return _same(earlier, upload, size) if earlier else record

    async def register(self, record: FileRecord) -> bool:
        """Add a file whose content is already stored; return whether it is new. Raises OSError."""
        return await self._store.create(f"{FOLDER}/{record.id}.json", encode(record))

    async def _discard(self, id_: str) -> None:
        """Delete a content, unless another request has added a file with it. Raises OSError."""
        if await self._read(id_) is None:
            await self._store.delete(f"{FOLDER}/{id_}.data")

    async def check_room(self, caller: Caller) -> None:
        """Check that the results of another batch may be stored.

        Raises:
            ApiError: the files of this tenant, or of all tenants, take all the space that they may,
                or are as many as they may be.
            OSError: the store cannot be used.
        """
        (await self._bounded(_nothing(), caller, new_files=RESULTS)).check()

    async def used_bytes(self) -> int:
        """Return the size of all files. Raises OSError."""
        return _bytes(await self.sized(await self.all()))

    async def get(self, id_: str, tenant: str, *, param: str = "id") -> FileRecord:
        """Return a file of a tenant that has not expired, with its present size.

        Raises:
            ApiError: 404.
            OSError: the store cannot be used.
        """
        record = await self.find(id_, tenant, param=param)
        if self._is_expired(record):
            raise _missing(id_, param)
        return await self._sized(record)

    async def find(self, id_: str, tenant: str, *, param: str = "id") -> FileRecord:
        """Return a file of a tenant, also if it has expired and is not deleted yet.

        Raises:
            ApiError: 404.
            OSError: the store cannot be used.
        """
        record = await self._read(id_) if FILE_ID.match(id_) else None
        if record is None or record.tenant != tenant:
            raise _missing(id_, param)
        return record

    async def listed(self, tenant: str) -> list[FileRecord]:
        """Return the files of a tenant, the oldest first. Raises OSError."""
        records = [
            record
            for record in await self.all()
            if record.tenant == tenant and not self._is_expired(record)
        ]
        records.sort(key=lambda record: (record.created_at, record.id))
        return records

    async def sized(self, records: Sequence[FileRecord]) -> list[FileRecord]:
        """Return files with their present sizes. Raises OSError."""
        unknown = [each for each in records if each.batch and each.id not in self._sizes]
        sizes = dict[str, int]()
        for first in range(0, len(unknown), READ_AT_ONCE):
            some = unknown[first : first + READ_AT_ONCE]
            sizes |= {each.id: each.bytes for each in await asyncio.gather(*map(self._sized, some))}
        return [
            replace(each, bytes=self._sizes.get(each.id, sizes.get(each.id, 0)))
            if each.batch
            else each
            for each in records
        ]

    async def content(self, record: FileRecord, start: int, end: int) -> AsyncIterator[bytes]:
        """Yield the bytes of a file from `start` to `end`. Raises OSError."""
        if not record.batch:
            async for chunk in self._store.chunks(f"{FOLDER}/{record.id}.data", start, end):
                yield chunk
            return
        state = BatchState(self._store, record.batch)
        async for chunk in state.lines(await self._segments(record), start, end):
            yield chunk

    async def delete(self, record: FileRecord) -> None:
        """Delete a file.

        Raises:
            ApiError: it is a result of a batch that has not ended.
            OSError: the store cannot be used.
        """
        if record.batch:
            state = BatchState(self._store, record.batch)
            snapshot = await state.snapshot()
            if snapshot and not snapshot.end:
                raise ApiError(
                    409,
                    f"file {record.id} has the results of batch {record.batch}, which still runs; "
                    "cancel the batch first",
                    "id",
                )
            await state.delete_results(record.kind)
        await self._store.delete(f"{FOLDER}/{record.id}.json")
        await self._store.delete(f"{FOLDER}/{record.id}.data")
        self._records.pop(record.id, None)

    async def all(self) -> list[FileRecord]:
        """Return the files of all tenants. Raises OSError."""
        names = await self._store.names(FOLDER)
        ids = {name[:-5] for name in names if name.endswith(".json")}
        for gone in self._records.keys() - ids:
            del self._records[gone]
            self._sizes.pop(gone, None)
        missing = sorted(filter(FILE_ID.match, ids - self._records.keys()))
        for first in range(0, len(missing), READ_AT_ONCE):
            await asyncio.gather(*map(self._read, missing[first : first + READ_AT_ONCE]))
        return [*self._records.values()]

    def name_of(self, record: FileRecord) -> str:
        """Return the name in the store of an uploaded file."""
        return f"{FOLDER}/{record.id}.data"

    async def free_bytes(self) -> int:
        """Return how many more bytes can be stored. Raises OSError."""
        return await self._store.free_bytes()

    async def delete_expired(self, needed: Collection[str] = ()) -> None:
        """Delete the files that have expired, except those that batches need. Raises OSError."""
        for record in await self.all():
            if self._is_expired(record) and record.id not in needed:
                try:
                    await self.delete(record)
                except ApiError:  # its batch still runs
                    continue

    async def tidy(self) -> None:
        """Delete what crashed routers have left. Raises OSError.

        A content without a record is deleted at the second call that finds it: at the first, a
        router may be about to write the record.
        """
        await self._store.tidy()
        names = {*await self._store.names(FOLDER)}
        contents = {name for name in names if name.endswith(".data")}
        unrecorded = {name for name in contents if f"{name[:-5]}.json" not in names}
        for name in unrecorded & self._unrecorded:
            await self._store.delete(f"{FOLDER}/{name}")
        self._unrecorded = unrecorded

    def _is_expired(self, record: FileRecord) -> bool:
        return record.expires_at is not None and record.expires_at <= self.clock.now_s()

    async def _read(self, id_: str) -> FileRecord | None:
        record = await read_record(self._store, f"{FOLDER}/{id_}.json", FileRecord)
        if record:
            self._records[id_] = record
        else:
            self._records.pop(id_, None)
        return record

    async def _sized(self, record: FileRecord) -> FileRecord:
        if not record.batch:
            return record
        if record.id not in self._sizes:
            state = BatchState(self._store, record.batch)
            snapshot = await state.snapshot()
            segments = await state.results(snapshot, record.kind) if snapshot else ()
            size = sum(segment.size for segment in segments)
            if not (snapshot and snapshot.end):
                return replace(record, bytes=size)
            self._sizes[record.id] = size
        return replace(record, bytes=self._sizes[record.id])

    async def _segments(self, record: FileRecord) -> Sequence[Segment]:
        state = BatchState(self._store, record.batch)
        snapshot = await state.snapshot()
        return await state.results(snapshot, record.kind) if snapshot else ()

    async def _bounded(
        self, parts: AsyncIterable[bytes], caller: Caller, *, new_files: int
    ) -> "_Bounded":
        """Return the content of an upload with its limits.

        Raises:
            ApiError: the tenant, or all tenants together, have as many files as they may have.
            OSError: the store cannot be used.
        """
        records = await self.sized(await self.all())
        own = [record for record in records if record.tenant == caller.tenant]
        if len(records) + new_files > MAX_FILES:
            raise ApiError(
                507,
                f"the files of all tenants would be more than {MAX_FILES}, which is the limit of a "
                "cluster; delete files",
                "file",
            )
        files, max_files = len(own) + new_files, caller.limits.get("max_files")
        if max_files is not None and files > max_files:
            raise _over("max_files", f"{files} files", f"{max_files}")
        return _Bounded(
            parts,
            self._uploading,
            caller.tenant,
            used=_bytes(own),
            total=_bytes(records),
            max_file_bytes=self._max_file_bytes,
            tenant_bytes=caller.limits.get("max_file_bytes"),
            quota_bytes=round((1 - SPARE_SHARE) * self._quota_bytes),
        )


@dataclass
class _Bounded:
    """The content of an upload, which ends with an error when a limit is exceeded."""

    parts: AsyncIterable[bytes]
    uploading: Counter[str]
    tenant: str
    used: int  # bytes of the tenant's files
    total: int  # bytes of all files
    max_file_bytes: int
    tenant_bytes: int | None
    quota_bytes: int
    size: int = 0

    async def chunks(self) -> AsyncIterator[bytes]:
        async for part in self.parts:
            self.size += len(part)
            self.uploading[self.tenant] += len(part)
            self.check()
            yield part

    def check(self) -> None:
        """Raise ApiError if a limit is exceeded."""
        if self.size > self.max_file_bytes:
            raise ApiError(
                413,
                f"the file has more than {self.max_file_bytes} bytes; split it, or start kvroute "
                "with a larger --max-file-mb",
                "file",
            )
        used = self.used + self.uploading[self.tenant]
        if self.tenant_bytes is not None and used > self.tenant_bytes:
            raise _over("max_file_bytes", f"{used} bytes of files", f"{self.tenant_bytes}")
        if self.total + self.uploading.total() > self.quota_bytes:
            raise ApiError(
                507,
                f"the files of all tenants would take more than {self.quota_bytes} bytes; delete "
                "files, or start kvroute with a larger --files-quota-mb",
                "file",
            )


async def _nothing() -> AsyncIterator[bytes]:
    """Yield no content."""
    return
    yield


def _same(earlier: FileRecord, upload: FileUpload, size: int) -> FileRecord:
    """Return a file if it is the one of this upload. Raises ApiError."""
    own = (earlier.filename, earlier.purpose, earlier.bytes)
    if own != (upload.filename, upload.purpose, size):
        raise reused(earlier.id)
    return earlier


def _bytes(records: Iterable[FileRecord]) -> int:
    return sum(record.bytes for record in records)


def _missing(id_: str, param: str) -> ApiError:
    message = f"No such File object: {id_[:80]}; it may have expired"
    return ApiError(404, message, param, code="not_found")


def _over(limit: str, use: str, allowed: str) -> ApiError:
    return ApiError(
        409,
        f"the tenant would have {use}; its limit {limit} is {allowed}. Delete files, or ask for a "
        "larger limit",
        "file",
        code="quota_exceeded",
    )
