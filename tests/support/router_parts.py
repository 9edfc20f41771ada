"""The parts of a model's router, built without Ray, Redis and replicas."""

from types import SimpleNamespace
from typing import Any, cast

from ray.serve.handle import DeploymentHandle

from kvroute.contract.unreadable import Unreadable
from kvroute.features.gate import OPEN, Gate
from kvroute.process.builtin_model import BUILTIN_MODEL, resolve
from kvroute.router.prompts.tokenizer import Prompts
from kvroute.router.serving.assembly import Parts
from kvroute.router.serving.router_base import RouterBase
from kvroute.settings.router import RouterSettings
from kvroute.store.clusters import ClusterModel
from kvroute.store.connection import connect
from kvroute.store.index import Index

# Features that are off by default -> the options with which they are on.
FEATURES_ON = {"responses": {"response_store_mb": 1}, "pulls": {"pull": "on"}}
NOWHERE = "redis://127.0.0.1:1"  # no Redis listens here


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
        ClusterModel(cluster, "m", "10.0.0.1:6379", "kvroute"),
    )


def fake_parts(tokenizer: Prompts, **settings: Any) -> Parts:
    """Return the parts of a router with these settings, and one deployment without replicas."""
    handle = SimpleNamespace(deployment_name="replicas", options=lambda: None)
    replicas = [cast("DeploymentHandle", handle)]
    return Parts(fake_base(tokenizer, **settings), replicas)


def builtin_prompts() -> Prompts:
    """Return the tokenizer of the built-in model."""
    return Prompts(resolve(BUILTIN_MODEL))
