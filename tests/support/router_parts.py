"""The parts of a model's router, built without Ray, Redis and replicas."""

import asyncio
from collections.abc import Collection
from typing import Any, cast

from kvroute.contract.unreadable import Unreadable
from kvroute.features.gate import OPEN, Gate
from kvroute.process.builtin_model import BUILTIN_MODEL, resolve
from kvroute.router.connections.replica_source import Deployed, NoReplicaError, ReplicaSource
from kvroute.router.prompts.tokenizer import Prompts
from kvroute.router.serving.assembly import Parts
from kvroute.router.serving.router_base import RouterBase
from kvroute.settings.router import RouterSettings
from kvroute.store.clusters import ClusterModel
from kvroute.store.connection import connect
from kvroute.store.index import Index
from kvroute.wire.address import Address

# Features that are off by default -> the options with which they are on.
FEATURES_ON = {"responses": {"response_store_mb": 1}, "pulls": {"pull": "on"}}
NOWHERE = "redis://127.0.0.1:1"  # no Redis listens here


class Elsewhere:
    """Surroundings on a machine that is not there."""

    address = "10.0.0.1"
    cluster_address = "10.0.0.1:6379"
    application = "kvroute"

    async def draining(self) -> None:
        await asyncio.Event().wait()

    def log(self, model: str | None) -> None: ...

    async def facts(self, port: int) -> dict[str, Any]:
        return {"host": None, "nodes": None, "serve": None}


ELSEWHERE = Elsewhere()


def fake_base(
    tokenizer: Prompts | None = None, *, cluster: str = "c", gate: Gate = OPEN, **settings: Any
) -> RouterBase:
    """Return the base of a router with these settings, whose Redis is away."""
    redis, unreadable = connect(NOWHERE), Unreadable()
    return RouterBase(
        "router",
        RouterSettings(served_model_name="m", redis_url=NOWHERE, cluster=cluster, **settings),
        cast("Prompts", tokenizer),
        redis,
        unreadable,
        Index(redis, "m", cluster=cluster, unreadable=unreadable),
        gate,
        ClusterModel(cluster, "m", ELSEWHERE.cluster_address, ELSEWHERE.application),
        ELSEWHERE,
    )


class NoReplicas:
    """A source that has no replicas."""

    def ids(self) -> Collection[str]:
        return ()

    def hold(self, replica_id: str) -> object:
        return None

    async def address(self, replica_id: str) -> Address:
        raise NoReplicaError(replica_id)

    async def probe(self, replica_id: str) -> None: ...

    async def kill(self, replica_id: str) -> None: ...

    def deployed(self) -> Deployed:
        return Deployed(0, {}, frozenset())


def fake_parts(tokenizer: Prompts, source: ReplicaSource | None = None, **settings: Any) -> Parts:
    """Return the parts of a router with these settings and replicas; None: there are none."""
    return Parts(fake_base(tokenizer, **settings), source or NoReplicas())


def builtin_prompts() -> Prompts:
    """Return the tokenizer of the built-in model."""
    return Prompts(resolve(BUILTIN_MODEL))
