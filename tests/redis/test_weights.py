"""Updates of weights: the record in Redis, replicas that follow it, and the operators' routes."""

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from redis.asyncio import Redis

from kvroute.contract.records import ReplicaRecord
from kvroute.replica.engine.pause import Pause
from kvroute.replica.sim_engine.config import SimulatedConfig
from kvroute.replica.sim_engine.simulated import SimulatedEngine
from kvroute.replica.weights import ReplicaWeights
from kvroute.router.api.bodies import Bodies
from kvroute.router.api.errors import ApiError, response
from kvroute.router.endpoints import cluster_routes
from kvroute.router.weights import updates
from kvroute.router.weights.updates import WeightsUpdates
from kvroute.store.keys import key_prefix
from kvroute.store.weights import UpdateRunningError, WeightsStore
from kvroute.weights.version import START, Weights, decode_source
from tests.support.records import record
from tests.support.waiting import until
from tests.support.weights import empty_weights


@pytest.fixture
def model() -> str:
    return uuid.uuid4().hex


@pytest.fixture
def store(redis: Redis, model: str) -> WeightsStore:
    return WeightsStore(redis, model)


def weights(name: str = "one", source: Path = Path("/weights/one")) -> Weights:
    return Weights(name=name, number=0, source=str(source))


# The record.


async def test_each_update_has_a_key_of_its_own(store: WeightsStore) -> None:
    assert await store.read() == START
    assert await store.revision() == 0
    one = await store.update(weights(), at_once=1, before=START)
    two = await store.update(weights(), at_once=2, before=one)
    assert await store.read() == two
    assert two.previous == one.current
    assert one.key != two.key
    with pytest.raises(UpdateRunningError):
        await store.update(weights(), at_once=1, before=one)


async def test_weights_that_no_replica_could_load_are_taken_back(store: WeightsStore) -> None:
    one = await store.update(weights(), at_once=1, before=START)
    await store.prove(one.key)
    await store.fail(one.key, "too late: a replica has them")
    proven = await store.read()
    assert proven
    assert (proven.key, proven.is_proven, proven.failure) == (one.key, True, None)
    two = await store.update(weights("two"), at_once=1, before=proven)
    await store.fail(one.key, "these are not the current ones")
    await store.fail(two.key, "cut")
    back = await store.read()
    assert back
    assert back.failure
    assert (back.key, back.is_proven, back.failure.problem) == (one.key, True, "cut")


async def test_a_lost_record_is_restored_once(store: WeightsStore, redis: Redis) -> None:
    one = await store.update(weights(), at_once=1, before=START)
    await redis.flushall()
    assert await store.revision() == 0
    await store.restore(one)
    await store.restore(START)
    assert await store.read() == one


async def test_an_unreadable_record_changes_nothing(
    store: WeightsStore, redis: Redis, model: str
) -> None:
    await redis.set(f"{key_prefix('default', model)}:weights", b"{")
    assert await store.read() is None
    assert store.unreadable.last


async def test_only_some_replicas_load_at_the_same_time(store: WeightsStore) -> None:
    assert await store.take_place("a", 1)
    assert await store.take_place("a", 1)
    assert not await store.take_place("b", 1)
    assert await store.take_place("b", 2)
    await store.leave_place("a")
    assert await store.take_place("c", 2)


# Replicas.


class Replica:
    """A replica with a simulated engine that follows the record."""

    def __init__(self, store: WeightsStore, name: str, root: Path) -> None:
        config = SimulatedConfig(weights_load_s=0)
        self.engine = SimulatedEngine(config)
        self.pause = Pause()
        self.name = name
        self.loads = 0
        self.weights = ReplicaWeights(
            [self.engine],
            store,
            replica_id=name,
            root=root,
            model=None,
            pause=self.pause,
            on_load=self._count,
        )

    def _count(self) -> None:
        self.loads += 1

    @property
    def key(self) -> str:
        return self.engine.facts.weights

    @property
    def record(self) -> ReplicaRecord:
        return record(self.name, weights=self.key, engine="simulated")

    @contextlib.contextmanager
    def following(self) -> Iterator["Replica"]:
        task = asyncio.create_task(self.weights.run())
        try:
            yield self
        finally:
            task.cancel()


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvroute.replica.weights.POLL_S", 0.02)
    monkeypatch.setattr("kvroute.replica.weights.RETRY_S", 0.02)
    monkeypatch.setattr(updates, "POLL_S", 0.02)


async def test_replicas_load_one_after_the_other_when_their_requests_have_ended(
    store: WeightsStore, tmp_path: Path
) -> None:
    empty_weights(tmp_path / "one")
    replicas = [Replica(store, name, tmp_path) for name in "abc"]
    with contextlib.ExitStack() as stack:
        for replica in replicas:
            stack.enter_context(replica.following())
        async with contextlib.AsyncExitStack() as running:
            for replica in replicas:
                await running.enter_async_context(replica.pause.outside())
            one = await store.update(weights(source=tmp_path / "one"), at_once=1, before=START)
            await until(lambda: sum(replica.pause.is_near for replica in replicas) == 1)
            assert {replica.key for replica in replicas} == {""}
        await until(lambda: {replica.key for replica in replicas} == {one.key})
        assert [replica.loads for replica in replicas] == [1, 1, 1]
    now = await store.read()
    assert now
    assert now.is_proven


async def test_a_broken_folder_leaves_all_replicas_as_they_are(
    store: WeightsStore, tmp_path: Path
) -> None:
    with Replica(store, "a", tmp_path).following() as replica:
        await store.update(weights(source=tmp_path / "gone"), at_once=1, before=START)
        async with asyncio.timeout(10):
            while not ((now := await store.read()) and now.failure):
                await asyncio.sleep(0.02)
        assert (now.key, replica.key, replica.loads) == ("", "", 0)
        assert "is not a folder" in now.failure.problem
        assert not replica.pause.is_near


async def test_a_new_replica_starts_with_the_current_weights(
    store: WeightsStore, tmp_path: Path
) -> None:
    empty_weights(tmp_path / "one")
    one = await store.update(weights(source=tmp_path / "one"), at_once=1, before=START)
    replica = Replica(store, "a", tmp_path)
    await replica.weights.start()
    assert replica.key == ""  # no replica has loaded the weights, so they may be broken
    await store.prove(one.key)
    replica = Replica(store, "a", tmp_path)
    await replica.weights.start()
    assert replica.key == one.key


async def test_a_replica_keeps_its_weights_while_redis_has_lost_them(
    store: WeightsStore, redis: Redis, tmp_path: Path
) -> None:
    empty_weights(tmp_path / "one")
    one = await store.update(weights(source=tmp_path / "one"), at_once=1, before=START)
    with Replica(store, "a", tmp_path).following() as replica:
        await until(lambda: replica.key == one.key)
        await redis.flushall()
        await asyncio.sleep(0.2)
        assert replica.key == one.key


# Routes.


class Fleet:
    """The replicas as a router sees them. All of them answer its questions as the first one."""

    def __init__(self, *replicas: Replica) -> None:
        self.replicas = replicas

    def ids(self) -> list[str]:
        return [replica.name for replica in self.replicas]

    def ranks_of(self, replica_id: str) -> tuple[str, ...]:
        return (replica_id,)

    def get(self, replica_id: str) -> ReplicaRecord | None:
        (found,) = (replica for replica in self.replicas if replica.name == replica_id)
        return None if found.pause.is_near else found.record

    async def ask(self, method: str, body: bytes, **_: Any) -> bytes:
        assert method == "check_weights"
        return (await self.replicas[0].weights.check(decode_source(body))).encode()


@contextlib.asynccontextmanager
async def serving(
    store: WeightsStore, root: Path | None, *replicas: Replica
) -> AsyncIterator[httpx.AsyncClient]:
    fleet: Any = Fleet(*replicas)
    settings: Any = SimpleNamespace(weights_root=root)
    served = SimpleNamespace(
        name="m", weights=WeightsUpdates(store, fleet, fleet, settings, fleet.ids)
    )
    app = FastAPI()
    app.state.models = SimpleNamespace(all=[served], select=lambda _: served)
    app.state.bodies = Bodies(limit_mb=1)
    app.include_router(cluster_routes.routes)

    @app.exception_handler(ApiError)
    async def refuse(_: Any, error: ApiError) -> Any:
        return response(error)

    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://router") as http:
        with contextlib.ExitStack() as stack:
            for replica in replicas:
                stack.enter_context(replica.following())
            yield http


def message(refusal: httpx.Response, status: int = 400) -> str:
    assert refusal.status_code == status, refusal.text
    return str(refusal.json()["error"]["message"])


async def test_an_update_ends_when_all_replicas_have_the_weights(
    store: WeightsStore, tmp_path: Path
) -> None:
    empty_weights(tmp_path / "step-1")
    replicas = [Replica(store, name, tmp_path) for name in "ab"]
    async with serving(store, tmp_path, *replicas) as http:
        before = (await http.get("/v1/weights")).json()["data"][0]
        assert (before["version"], before["state"], before["failed"]) == ("", "ready", None)
        done = await http.post("/v1/weights", json={"source": "step-1"})
        assert done.status_code == 200, done.text
        state = (await http.get("/v1/weights")).json()["data"][0]
    assert done.json() == state
    assert (state["version"], state["state"]) == ("step-1", "ready")
    assert state["source"] == str(tmp_path / "step-1")
    assert [replica["version"] for replica in state["replicas"]] == ["step-1", "step-1"]


async def test_a_long_update_goes_on_after_the_answer_and_refuses_others(
    store: WeightsStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty_weights(tmp_path / "step-1")
    monkeypatch.setattr(updates, "WAIT_S", 0.2)
    replica = Replica(store, "a", tmp_path)
    async with serving(store, tmp_path, replica) as http:
        async with replica.pause.outside():  # a request runs
            begun = await http.post("/v1/weights", json={"source": "step-1", "version": "v1"})
            assert (begun.status_code, begun.json()["state"]) == (202, "updating")
            busy = {"id": "a", "version": None, "key": None, "problem": None}
            assert begun.json()["replicas"] == [busy]
            again = await http.post("/v1/weights", json={"source": "step-1"})
            assert "1 replica of the last update has not" in message(again, 409)
        await until(lambda: replica.key.startswith("v1@"))


async def test_weights_that_cannot_be_loaded_are_refused_with_the_reason(
    store: WeightsStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty_weights(tmp_path / "step-1")
    replica = Replica(store, "a", tmp_path)
    async with serving(store, tmp_path, replica) as http:
        for body, words in (
            ({"source": "gone"}, "is not a folder on the replica's machine. The old weights"),
            ({"source": "../step-1"}, "--weights-root"),
            ({"source": "step-1", "version": "a b"}, 'version is "a b"'),
            ({"source": "step-1", "at_once": 0}, "at_once"),
            ({}, "source"),
        ):
            assert words in message(await http.post("/v1/weights", json=body))
        assert await store.read() == START

        async def passes(_: str) -> str:  # the check finds nothing, and the load fails
            return ""

        monkeypatch.setattr(replica.weights, "check", passes)
        (tmp_path / "step-1" / "model.safetensors").write_bytes(b"cut")
        refused = await http.post("/v1/weights", json={"source": "step-1"})
        assert "is not a safetensors file" in message(refused)
        state = (await http.get("/v1/weights")).json()["data"][0]
    assert (state["version"], state["state"]) == ("", "ready")
    assert "is not a safetensors file" in state["failed"]["problem"]


async def test_a_cluster_without_a_folder_of_weights_refuses_updates(store: WeightsStore) -> None:
    async with serving(store, None) as http:
        refused = await http.post("/v1/weights", json={"source": "step-1"})
        assert "--weights-root FOLDER" in message(refused)


async def test_a_router_restores_the_record(
    store: WeightsStore, redis: Redis, tmp_path: Path
) -> None:
    empty_weights(tmp_path / "one")
    one = await store.update(weights(source=tmp_path / "one"), at_once=1, before=START)
    async with serving(store, tmp_path) as http:
        await http.get("/v1/weights")
        await redis.flushall()
        await http.get("/v1/weights")
    assert await store.read() == one


async def test_a_client_may_leave_before_the_replicas_have_the_weights(
    store: WeightsStore, tmp_path: Path
) -> None:
    empty_weights(tmp_path / "step-1")
    replica = Replica(store, "a", tmp_path)
    async with serving(store, tmp_path, replica) as http:
        async with replica.pause.outside():  # a request runs
            begun = await http.post("/v1/weights", json={"source": "step-1", "wait": False})
        state = begun.json()
        assert (begun.status_code, state["state"], state["version"]) == (202, "updating", "step-1")
        await until(lambda: replica.key == state["key"])


async def test_a_replica_that_cannot_load_what_others_have_says_why(
    store: WeightsStore, redis: Redis, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvroute.replica.weights.RETRY_S", 1.0)
    here, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    empty_weights(here / "step-1")
    elsewhere.mkdir()  # another machine, which lacks the weights
    one = await store.update(weights("step-1", here / "step-1"), at_once=1, before=START)
    await store.prove(one.key)
    replicas = [Replica(store, "a", here), Replica(store, "b", elsewhere)]
    async with serving(store, here, *replicas) as http:

        async def states() -> list[dict[str, Any]]:
            return list((await http.get("/v1/weights")).json()["data"][0]["replicas"])

        async with asyncio.timeout(10):
            while [each["key"] for each in await states()] != [one.key, ""]:
                await asyncio.sleep(0.02)
            while not (await states())[1]["problem"]:
                await asyncio.sleep(0.02)
        first, second = await states()
    assert (first["version"], first["problem"]) == ("step-1", None)
    assert (second["version"], "elsewhere" in second["problem"]) == ("", True)
    reported = f"{key_prefix('default', model)}:weights:problem:b"
    assert 0 < await redis.pttl(reported) <= 3000
    await redis.set(reported, b"{")
    assert await store.problems(["a", "b"]) == {}
    assert store.unreadable.last
