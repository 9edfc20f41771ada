"""A replica gets the body of a request in parts, before the request."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import numpy as np
import pytest
from msgspec.msgpack import encode

from kvroute.contract.generation import Chunk, EngineDeadError, Generate, GenerateRequest
from kvroute.contract.http_call import HttpCall, HttpPart, Upload
from kvroute.features.audio import uploaded_bodies as bodies_module
from kvroute.features.audio.audio_routes import upload
from kvroute.features.audio.recordings import Recording
from kvroute.features.audio.uploaded_bodies import HELD_LIMITS, UploadedBodies
from kvroute.router.placement.attempts import RequestContext
from kvroute.router.placement.fleet import Fleet
from kvroute.wire.link import LostError, RefusedError
from tests.support.waiting import until
from tests.support.wired import Wired, dispatcher_of

BODY = random.Random(0).randbytes(700_000)
TOKENS = np.zeros(30, np.uint32)


class Parts(Recording):
    """A form in memory."""

    def __init__(self, body: bytes = BODY, size: int = 100_000) -> None:
        self.upload = Upload("u", len(body), "multipart/form-data; boundary=x", b"digest")
        self._body, self._size = body, size

    async def parts(self) -> AsyncIterator[bytes]:
        for begin in range(0, len(self._body), self._size):
            yield self._body[begin : begin + self._size]


class Replica:
    """Answers with the body's length, or dies as soon as it has got the request."""

    def __init__(self, *, dies: bool = False, limit_mb: int = 1) -> None:
        self.uploads = UploadedBodies(limit_mb=limit_mb)
        self.got: list[bytes] = []
        self._dies = dies

    async def generate(self, request: GenerateRequest, emit: object) -> None:
        async with self.uploads.around(request, b"") as used:
            assert used.call
            assert used.call.upload
            with open(used.call.upload.path, "rb") as file:  # noqa: ASYNC230
                self.got.append(file.read())
            if self._dies:
                raise EngineDeadError("it broke")
            part = HttpPart(b"{}", 200, "application/json")
            assert callable(emit)
            emit(Chunk((1,), 0, is_last=True, http=part))


def wired(**replicas: Replica) -> Wired:
    generates: dict[str, Generate] = {id_: each.generate for id_, each in replicas.items()}
    wired = Wired(generates)
    for id_, replica in replicas.items():
        wired.servers[id_].methods = dict(replica.uploads.methods())
    return wired


def fleet_of() -> Fleet:
    return Fleet(model="m", revision="", block_size=16, rng=random.Random())


def request(size: int = len(BODY), id_: str = "u") -> GenerateRequest:
    call = HttpCall("/v1/audio/transcriptions", b"", 0.0, upload=Upload(id_, size, "", b""))
    return GenerateRequest("r-1", TOKENS, call=call)


async def added(uploads: UploadedBodies, offset: int, data: bytes, id_: str = "u") -> bytes:
    return await uploads.upload(encode((id_, offset, data)), 0)


async def transcribed(wired: Wired, body: Parts) -> Chunk | None:
    dispatcher = dispatcher_of(wired, fleet_of())
    call = HttpCall("/v1/audio/transcriptions", b"", 0.0, upload=body.upload)
    sending = partial(upload, body, wired.links)
    context = RequestContext(is_opaque=True, before_send=sending)
    generation = await dispatcher.generate(TOKENS, call, context)
    return await generation.next()


@asynccontextmanager
async def running(uploads: UploadedBodies) -> AsyncIterator[None]:
    """Run the tasks of a replica's side, and cancel them as a replica that ends."""
    tasks = [asyncio.create_task(task) for task in uploads.tasks().values()]
    yield
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_body_arrives_as_it_is_and_is_deleted_with_its_request() -> None:
    replica = Replica()
    async with wired(r1=replica) as router:
        chunk = await transcribed(router, Parts())
    assert chunk
    assert replica.got == [BODY]
    assert replica.uploads._held == 0


async def test_another_replica_gets_the_body_if_the_first_one_dies() -> None:
    dying, other = Replica(dies=True), Replica()
    while not dying.got:  # until the dying one is asked first
        async with wired(r1=dying, r2=other) as router:
            assert await transcribed(router, Parts())
    assert dying.got == [BODY]
    assert set(other.got) == {BODY}


async def test_a_replica_without_space_refuses_and_another_one_takes_the_request() -> None:
    full, other = Replica(limit_mb=1), Replica()
    full.uploads._limit = 1000
    async with wired(r1=full, r2=other) as router:
        for _ in range(4):
            assert await transcribed(router, Parts())
        with pytest.raises(RefusedError, match="holds 0 MB"):
            await upload(Parts(), router.links, "r1")
    assert other.got == [BODY] * 4
    assert full.got == []
    assert full.uploads._held == 0


async def test_a_replica_that_is_lost_during_the_upload_is_reported_as_lost() -> None:
    async with wired(r1=Replica()) as router:
        router.links.lose("r1", LostError("gone"))
        with pytest.raises(RefusedError, match="no connection"):
            await upload(Parts(), router.links, "r1")


async def test_a_body_with_a_gap_is_refused_and_deleted() -> None:
    uploads = UploadedBodies(limit_mb=1)
    assert await added(uploads, 0, b"abc") == b""
    with pytest.raises(ValueError, match="before byte 5 is missing"):
        await added(uploads, 5, b"x")
    assert uploads._held == 0
    with pytest.raises(ValueError, match="missing"):
        await added(uploads, 3, b"x")


async def test_a_body_that_starts_again_replaces_the_first_one() -> None:
    uploads = UploadedBodies(limit_mb=1)
    await added(uploads, 0, b"abc")
    await added(uploads, 0, b"de")
    async with uploads.around(request(2), b"") as used:
        assert used.call
        assert used.call.upload
        with open(used.call.upload.path, "rb") as file:  # noqa: ASYNC230
            assert file.read() == b"de"
    assert uploads._held == 0


async def test_a_request_whose_body_is_not_complete_fails() -> None:
    uploads = UploadedBodies(limit_mb=1)
    await added(uploads, 0, b"abc")
    for stored in (3, 0):
        with pytest.raises(RuntimeError, match=f"{stored} of 4 bytes"):
            async with uploads.around(request(4), b""):
                pass
    assert uploads._held == 0


async def test_a_body_whose_request_never_comes_is_deleted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bodies_module, "ABANDONED_S", 0.0)
    uploads = UploadedBodies(limit_mb=1)
    await added(uploads, 0, b"abc")
    async with running(uploads):
        await until(lambda: not uploads._files)
    assert uploads._held == 0


async def test_bodies_are_deleted_when_the_replica_ends() -> None:
    uploads = UploadedBodies(limit_mb=1)
    await added(uploads, 0, b"abc")
    async with running(uploads):
        await asyncio.sleep(0)
        assert uploads._files
    assert uploads._held == 0


async def test_a_replica_that_stops_takes_no_bodies() -> None:
    uploads = UploadedBodies(limit_mb=1, refusal=lambda: "it is stopping")
    assert await added(uploads, 0, b"abc") == b"it is stopping"


async def test_the_space_of_all_bodies_is_limited() -> None:
    uploads, data = UploadedBodies(limit_mb=1), bytes(1 << 20)
    async with running(uploads):
        refusals = [await added(uploads, 0, data, id_=str(n)) for n in range(HELD_LIMITS + 2)]
        assert [bool(refusal) for refusal in refusals] == [False] * HELD_LIMITS + [True] * 2
        assert uploads._held == HELD_LIMITS << 20
