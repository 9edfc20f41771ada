"""The batches of the Batch API: created, listed and cancelled here, and run by runner.py."""

import asyncio
import re
from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from kvroute.batch.lines import PATHS
from kvroute.features.batches.batch_state import FOLDER, BatchState, Snapshot
from kvroute.features.batches.files import Files
from kvroute.features.batches.records import (
    BATCH_ID,
    BatchRecord,
    FileRecord,
    Kind,
    new_batch_id,
    new_file_id,
)
from kvroute.features.batches.stores.file_store import FileStore
from kvroute.features.gate import Caller
from kvroute.router.api.errors import ApiError, invalid, shown
from kvroute.router.api.parsing import Metadata
from kvroute.router.endpoints.idempotency import reused

PURPOSE = "batch"  # purpose of files that are the input of batches
RESULTS = "batch_output"  # purpose of files with the results of batches
WINDOW = re.compile(r"(\d{1,6})([smhd])\Z")
UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
MIN_TTL_S, MAX_TTL_S = 3600, 10 * 365 * 86_400  # limits of the seconds until a file expires
RESULTS_TTL_S = 30 * 86_400  # seconds until results expire, as in OpenAI's API
# The record of a batch is kept for this many seconds after the batch's end. By default, its results
# are deleted earlier.
FORGOTTEN_S = 60 * 86_400
# The most batches that have ended and have no results, of all tenants. Each router looks through
# the list of all batches every second; for this many, this takes about a twentieth of a second.
MAX_ENDED = 10_000
MAX_WINDOW_S = 30 * 86_400  # longest completion window
# The most batches that have not ended, of all tenants. Each router reads the state of all of them
# every second; for this many, this takes about a tenth of a second.
MAX_OPEN = 1024
READ_AT_ONCE = 32  # batches whose states are read at the same time

Text = Annotated[str, Field(max_length=512)]


class ExpiresAfter(BaseModel):
    """When a file expires, or the results of a batch."""

    anchor: Literal["created_at"] = "created_at"
    seconds: Annotated[int, Field(ge=MIN_TTL_S, le=MAX_TTL_S)]


class BatchBody(BaseModel):
    """The body of a request that creates a batch."""

    model_config = ConfigDict(extra="ignore")

    input_file_id: Text
    endpoint: Text
    completion_window: Text = "24h"
    metadata: Metadata | None = None
    output_expires_after: ExpiresAfter | None = None


class Batches:
    """The batches of all tenants."""

    def __init__(self, store: FileStore, files: Files) -> None:
        self._store = store
        self._files = files
        # The latest known states. Those of batches that have ended do not change any more.
        self._known: dict[str, Snapshot] = {}

    async def create(self, body: BatchBody, caller: Caller, id_: str = "") -> Snapshot:
        """Create a batch, which some router runs soon.

        Args:
            body: what the batch is made of.
            caller: its owner.
            id_: its id; empty: a new one. If there is such a batch, it is returned.

        Raises:
            ApiError: the body cannot be used, the tenant has too many open batches, or there is a
                batch with this id and another body.
            OSError: the store cannot be used.
        """
        id_ = id_ or new_batch_id()
        if (earlier := await self._snapshot(id_)) is not None:
            return _same(earlier, body)
        tenant, now = caller.tenant, int(self._files.clock.now_s())
        if body.endpoint not in PATHS:
            raise invalid(
                "endpoint", f"endpoint is {shown(body.endpoint)}; expected {', '.join(PATHS)}"
            )
        window_s = _window_s(body.completion_window)
        file = await self._files.get(body.input_file_id, tenant, param="input_file_id")
        if file.purpose != PURPOSE:
            raise invalid(
                "input_file_id",
                f"file {file.id} has the purpose {file.purpose}; upload it with the purpose "
                f"{PURPOSE}",
            )
        await self._check_open(caller)
        await self.delete_old()
        await self._files.check_room(caller)
        expires = body.output_expires_after
        record = BatchRecord(
            id_,
            tenant,
            input_file_id=file.id,
            endpoint=body.endpoint,
            completion_window=body.completion_window,
            created_at=now,
            expires_at=now + window_s,
            output_file_id=new_file_id(),
            error_file_id=new_file_id(),
            priority=caller.priority,
            metadata=body.metadata,
            output_ttl_s=expires.seconds if expires else None,
        )
        await BatchState(self._store, id_).create(record)
        return _same(await self._found(id_, tenant), body)

    async def get(self, id_: str, tenant: str) -> Snapshot:
        """Return a batch of a tenant.

        Raises:
            ApiError: 404.
            OSError: the store cannot be used.
        """
        return await self._found(id_, tenant)

    async def cancel(self, id_: str, tenant: str) -> Snapshot:
        """Cancel a batch. A batch that no router has begun to run ends at once.

        Raises:
            ApiError: there is no such batch, or it has ended.
            OSError: the store cannot be used.
        """
        snapshot = await self._found(id_, tenant)
        if snapshot.end and snapshot.end.status != "cancelled":
            raise ApiError(
                409, f"batch {id_} cannot be cancelled: its status is {snapshot.end.status}", "id"
            )
        if not snapshot.end:
            state = BatchState(self._store, id_)
            await state.cancel()
            if snapshot.run is None:
                await state.end_unstarted("", "cancelled")
        return await self._found(id_, tenant)

    async def end_expired(self, snapshot: Snapshot) -> None:
        """End a batch that has expired before a router has begun to run it. Raises OSError."""
        await BatchState(self._store, snapshot.id).end_unstarted("", "expired")

    async def listed(self, tenant: str | None) -> list[Snapshot]:
        """Return the batches of a tenant, the newest first. None: those of all tenants.

        Raises:
            OSError: the store cannot be used.
        """
        ids = {name for name in await self._store.names(FOLDER) if BATCH_ID.match(name)}
        for gone in self._known.keys() - ids:
            self._known.pop(gone, None)
        wanted = [id_ for id_ in ids if self._may_belong_to(tenant, id_)]
        found = list[Snapshot]()
        for first in range(0, len(wanted), READ_AT_ONCE):
            some = wanted[first : first + READ_AT_ONCE]
            changing = [id_ for id_ in some if not self._has_ended(id_)]
            await asyncio.gather(*map(self._snapshot, changing))
            snapshots = [self._known.get(id_) for id_ in some]
            found += [each for each in snapshots if each and tenant in (None, each.record.tenant)]
        found.sort(key=lambda snapshot: (-snapshot.record.created_at, snapshot.record.id))
        return found

    async def inputs(self) -> set[str]:
        """Return the ids of the files that batches still need. Raises OSError."""
        return {
            snapshot.record.input_file_id
            for snapshot in await self.listed(None)
            if not snapshot.end
        }

    async def delete_old(self) -> None:
        """Delete ended batches without results, if they are too old or too many. Raises OSError."""
        ended = [snapshot for snapshot in await self.listed(None) if snapshot.end]
        kept = {record.batch for record in await self._files.all()}
        without_results = [snapshot for snapshot in ended if snapshot.id not in kept]
        for id_ in _forgotten(without_results, self._files.clock.now_s()):
            await BatchState(self._store, id_).delete()
            self._known.pop(id_, None)

    async def register_results(self, record: BatchRecord, kind: Kind) -> None:
        """Register the file with a batch's results, so that clients can read it. Raises OSError."""
        ttl_s = RESULTS_TTL_S if record.output_ttl_s is None else record.output_ttl_s
        file = FileRecord(
            record.output_file_id if kind == "output" else record.error_file_id,
            record.tenant,
            filename=f"{record.id}_{kind}.jsonl",
            purpose=RESULTS,
            created_at=record.created_at,
            expires_at=record.expires_at + ttl_s,
            batch=record.id,
            kind=kind,
        )
        await self._files.register(file)

    async def _found(self, id_: str, tenant: str) -> Snapshot:
        snapshot = await self._snapshot(id_) if BATCH_ID.match(id_) else None
        if snapshot is None or snapshot.record.tenant != tenant:
            message = (
                f"No batch found with id '{id_[:80]}'; GET /v1/batches lists yours. If it had no "
                "results, it may have been deleted after its end"
            )
            raise ApiError(404, message, "id", code="not_found")
        return snapshot

    async def _snapshot(self, id_: str) -> Snapshot | None:
        known = self._known.get(id_)
        if known and known.end:
            return known
        snapshot = await BatchState(self._store, id_).snapshot(known)
        if snapshot:
            self._known[id_] = snapshot
        else:
            self._known.pop(id_, None)
        return snapshot

    def _has_ended(self, id_: str) -> bool:
        known = self._known.get(id_)
        return known is not None and known.end is not None

    def _may_belong_to(self, tenant: str | None, id_: str) -> bool:
        known = self._known.get(id_)
        return known is None or tenant in (None, known.record.tenant)

    async def _check_open(self, caller: Caller) -> None:
        """Check that the tenant, and all tenants together, may have another open batch.

        Raises:
            ApiError: 429.
            OSError: the store cannot be used.
        """
        running = [snapshot for snapshot in await self.listed(None) if not snapshot.end]
        own = sum(snapshot.record.tenant == caller.tenant for snapshot in running)
        most = caller.limits.get("max_open_batches")
        if most is not None and own >= most:
            raise ApiError(
                429,
                f"the tenant has {own} batches that have not ended; its limit is {most}. Wait for "
                "one of them, or cancel it",
                code="quota_exceeded",
            )
        if len(running) >= MAX_OPEN:
            raise ApiError(
                429,
                f"the cluster has {len(running)} batches that have not ended, which is its limit; "
                "try again when one of them has ended",
                code="overloaded",
            )


def as_object(snapshot: Snapshot) -> dict[str, Any]:
    """Return a batch in the format of OpenAI's API."""
    record, started, end = snapshot.record, snapshot.started, snapshot.end
    progress = end.progress if end else snapshot.progress
    usage = progress.usage
    times = {f"{status}_at": None for status in ("completed", "failed", "expired", "cancelled")}
    if end:
        times[f"{end.status}_at"] = end.at  # type: ignore[assignment]
    faults = None
    if end and end.faults:
        faults = {
            "object": "list",
            "data": [
                {"code": fault.code, "message": fault.message, "param": None, "line": fault.line}
                for fault in end.faults
            ],
        }
    return {
        "id": record.id,
        "object": "batch",
        "endpoint": record.endpoint,
        "errors": faults,
        "input_file_id": record.input_file_id,
        "completion_window": record.completion_window,
        "status": snapshot.status,
        "output_file_id": record.output_file_id if progress.completed else None,
        "error_file_id": record.error_file_id if progress.failed else None,
        "created_at": record.created_at,
        "in_progress_at": started.in_progress_at if started else None,
        "expires_at": record.expires_at,
        "finalizing_at": progress.finalizing_at,
        "cancelling_at": snapshot.cancelled.cancelling_at if snapshot.cancelled else None,
        **times,
        "request_counts": {
            "total": started.total if started else 0,
            "completed": progress.completed,
            "failed": progress.failed,
        },
        "usage": {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens},
            "output_tokens": usage.answer_tokens,
            "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
            "total_tokens": usage.prompt_tokens + usage.answer_tokens,
        },
        "metadata": record.metadata,
    }


def _same(earlier: Snapshot, body: BatchBody) -> Snapshot:
    """Return a batch if its body is this one. Raises ApiError."""
    record, expires = earlier.record, body.output_expires_after
    own = (record.input_file_id, record.endpoint, record.completion_window, record.metadata)
    if (*own, record.output_ttl_s) != (
        *(body.input_file_id, body.endpoint, body.completion_window, body.metadata),
        expires.seconds if expires else None,
    ):
        raise reused(earlier.id)
    return earlier


def _forgotten(ended: Sequence[Snapshot], now_s: float) -> set[str]:
    """Return the ids of batches that are deleted, given the ended ones without results.

    If they are too many, the oldest ones of the tenants that have the most of them are deleted.
    """
    ended = sorted(ended, key=lambda snapshot: -_ended_at(snapshot))
    newer = Counter[str]()  # number of newer batches, by tenant
    ranked = list[tuple[int, Snapshot]]()
    for snapshot in ended:
        ranked.append((newer[snapshot.record.tenant], snapshot))
        newer[snapshot.record.tenant] += 1
    ranked.sort(key=lambda item: item[0])
    limit = now_s - FORGOTTEN_S
    return {
        snapshot.id
        for number, (_, snapshot) in enumerate(ranked)
        if number >= MAX_ENDED or _ended_at(snapshot) < limit
    }


def _ended_at(snapshot: Snapshot) -> int:
    assert snapshot.end is not None
    return snapshot.end.at


def _window_s(text: str) -> int:
    """Parse a completion window, such as 24h or 30m.

    Raises:
        ApiError: it is not valid.
    """
    found = WINDOW.match(text)
    window_s = int(found[1]) * UNITS_S[found[2]] if found else 0
    if not 0 < window_s <= MAX_WINDOW_S:
        raise invalid(
            "completion_window",
            f"completion_window is {shown(text)}; expected a time such as 24h, 90m or 7d, up to "
            f"{MAX_WINDOW_S // 86_400}d",
        )
    return window_s
