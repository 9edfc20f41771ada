"""The Files and Batch API of one router: its parts, and whether they can be used."""

import asyncio
import logging
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import httpx
from fastapi import Depends, Request
from starlette.types import ASGIApp

from kvroute.features.batches import report
from kvroute.features.batches.batch_leases import BatchLeases
from kvroute.features.batches.batch_options import BUCKETS, BatchOptions
from kvroute.features.batches.batches import Batches
from kvroute.features.batches.files import Files
from kvroute.features.batches.records import BatchRecord
from kvroute.features.batches.runner import BatchRunner
from kvroute.features.batches.stores.file_places import FilePlaces
from kvroute.features.batches.stores.file_store import UNLIMITED, StoreFullError
from kvroute.features.batches.stores.folder import Folder
from kvroute.features.figure import Figure
from kvroute.features.gate import Caller
from kvroute.features.router_service import RouterService, RouterServices
from kvroute.process.exposition import Readings
from kvroute.process.state_folder import stored_files
from kvroute.router.api.errors import ApiError
from kvroute.router.middleware.caller_check import client_for
from kvroute.router.serving.router_base import RouterBase
from kvroute.store.connection import REDIS_ERRORS

if TYPE_CHECKING:
    from kvroute.features.batches.stores.bucket import Bucket

log = logging.getLogger("kvroute.batches")

PLACE = "place.id"  # file with the id of the folder
ANNOUNCE_S = 2.0  # seconds between two announcements of the folder's id
STOP_S = 1.0  # longest wait for the last results at the shutdown
LINE_THREADS = 4  # threads that read lines of batches
# By default, files may use this share of the disk space that is free or that they already use.
QUOTA_SHARE = 0.5
OPEN_SHARE = 0.5  # share of --max-requests that the lines of batches may use


class BatchService(RouterService):
    """The files and batches of one router."""

    name = "batches"

    def __init__(
        self,
        base: RouterBase,
        store: "Folder | Bucket",
        options: BatchOptions,
        *,
        quota_bytes: int,
    ) -> None:
        # Lines are read in these threads only, so that a disk that hangs blocks no other work.
        self._threads = ThreadPoolExecutor(LINE_THREADS, thread_name_prefix="batch-lines")
        self._store = store
        self._gate = base.gate
        self._places = FilePlaces(base.redis, cluster=base.cluster)
        self._application: ASGIApp | None = None  # set when the router has built it
        self._is_stopping = False
        self.problem = ""  # why the API cannot be used; empty: it can
        self._is_default = options.files_dir is None  # nobody has chosen the place
        self.quota_bytes = quota_bytes
        self.files = Files(
            store,
            max_file_bytes=options.max_file_mb << 20,
            quota_bytes=quota_bytes,
            clock=self._places.clock,
        )
        self.batches = Batches(store, self.files)
        self.runner = BatchRunner(
            base.router_id,
            store,
            self.files,
            self.batches,
            leases=BatchLeases(base.redis, base.router_id, cluster=base.cluster),
            client=self._client,
            may_run=lambda record: self._caller(record) is not None,
            max_line_bytes=base.settings.max_body_mb << 20,
            threads=self._threads,
            max_open=max(1, round(OPEN_SHARE * base.settings.max_requests)),
        )

    def attach(self, application: ASGIApp) -> None:
        self._application = application

    def metrics(self, readings: Readings) -> None:
        report.export(self.runner, readings)

    def start(self) -> None:
        self.running = [
            asyncio.create_task(self._announce()),
            asyncio.create_task(self.runner.run()),
        ]

    async def facts(self) -> dict[str, Any]:
        problem = self.problem or self.runner.problem
        if not problem:
            try:
                found = await report.facts(
                    self.files, self.batches, self.runner, quota_bytes=self.quota_bytes
                )
                return {"problem": "", **found}
            except OSError as error:
                problem = f"the folder for files cannot be used: {error}"
        return {"problem": problem, "is_default": self._is_default}

    def figures(self) -> Sequence[Figure]:
        return () if self.problem else report.figures(self.runner)

    async def stop(self) -> None:
        """End the runs of this router, so that other routers go on with them.

        A disk that hangs delays this by at most STOP_S.
        """
        if not self._is_stopping:
            self._is_stopping = True
            for task in self.running:
                task.cancel()
        if self.running:
            await asyncio.wait(self.running, timeout=STOP_S)

    def close(self) -> None:
        self._store.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _announce(self) -> None:
        """Compare this router's folder with those of the other routers, until cancelled."""
        id_ = ""
        while True:
            try:
                id_ = await self._place_id(id_)
            except OSError as error:
                self._set_problem(f"the folder for files cannot be used: {error}")
                await asyncio.sleep(ANNOUNCE_S)
                continue
            try:
                places = await self._places.announce(id_)
                self._set_problem(
                    f"the routers of this cluster use {places} different folders; start it with "
                    "--files-dir and a folder that all nodes share, or a bucket"
                    if places > 1
                    else ""
                )
            except REDIS_ERRORS:
                pass  # the folders are compared again when Redis is back
            await asyncio.sleep(ANNOUNCE_S)

    def _set_problem(self, problem: str) -> None:
        if problem and problem != self.problem:
            level = logging.INFO if self._is_default else logging.ERROR
            log.log(level, "no files and no batches: %s", problem)
        self.problem = problem

    async def _place_id(self, known: str) -> str:
        """Return the folder's id.

        Args:
            known: the id from an earlier call; empty: there was no earlier call.

        Raises:
            OSError: the folder cannot be used, or is another one now.
        """
        if not known:
            await self._store.create(PLACE, uuid.uuid4().hex.encode())
        id_ = (await self._store.read(PLACE)).decode(errors="replace")
        if known and id_ != known:
            raise OSError("it is another folder than before; is a disk missing?")
        return id_

    def _caller(self, record: BatchRecord) -> Caller | None:
        return self._gate.sender(record.tenant, record.priority)

    def _client(self, record: BatchRecord) -> httpx.AsyncClient:
        assert self._application is not None
        return client_for(self._application, self._caller(record))


class Unusable(RouterService):
    """Stands for the service of a router that cannot open the place for files.

    The router goes on with everything else, and opens the place when it starts the next time.
    """

    name = BatchService.name

    def __init__(self, problem: str, *, is_default: bool) -> None:
        """Keep why the place cannot be used, and whether nobody has chosen it."""
        self.problem = problem
        self._is_default = is_default

    async def facts(self) -> dict[str, Any]:
        return {"problem": self.problem, "is_default": self._is_default}


def batch_service(base: RouterBase) -> BatchService | Unusable | None:
    """Return the service of a router; None if --files-dir is off. This waits for the disk."""
    options = base.settings.of(BatchService.name, BatchOptions)
    if options.files_dir == "off":
        return None
    place = f"{options.files_dir or stored_files() / 'files'}/{quote(base.cluster, safe='')}"
    try:
        store = _opened(place)
        space_bytes = store.free_bytes_now() + store.used_bytes_now()
    except OSError as error:
        problem = f"{place} cannot be used ({error}); correct this, then restart the routers"
        log.error("no files and no batches: %s", problem)
        return Unusable(problem, is_default=options.files_dir is None)
    quota_mb = options.files_quota_mb
    quota_bytes = space_bytes if space_bytes >= UNLIMITED else round(QUOTA_SHARE * space_bytes)
    if quota_mb is not None:
        quota_bytes = quota_mb << 20
    return BatchService(base, store, options, quota_bytes=quota_bytes)


def _opened(place: str) -> "Folder | Bucket":
    """Return the store at a path or URL. Raises OSError."""
    if not place.startswith(BUCKETS):
        return Folder(Path(place))
    # Imported late, since most clusters use a folder.
    from kvroute.features.batches.stores.bucket import open_bucket

    return open_bucket(place, Path(mkdtemp(prefix="kvroute-files-")))


@contextmanager
def needing_store() -> Iterator[None]:
    """Run a block that needs the store of files.

    Raises:
        ApiError: 507: the store is full. 503: it cannot be used.
    """
    try:
        yield
    except StoreFullError as error:
        message = f"the disk for files is full ({error.strerror}); delete files, or try again later"
        raise ApiError(507, message) from None
    except OSError as error:
        message = f"the folder for files cannot be used ({error}); try again later"
        raise ApiError(503, message, code="storage_unavailable") from None


async def _service(request: Request) -> BatchService:
    services: RouterServices = request.app.state.services
    service = services.get(BatchService.name)
    if service is None:
        raise ApiError(
            404,
            "this server stores no files and runs no batches, because it was started with "
            "--files-dir off",
        )
    assert isinstance(service, BatchService | Unusable)
    if service.problem or isinstance(service, Unusable):
        raise ApiError(503, service.problem, code="storage_unavailable")
    return service


# FastAPI passes the service to each route that has a parameter of this type.
Service = Annotated[BatchService, Depends(_service)]
