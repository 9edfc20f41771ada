"""Binds the routers to the replicas: what `kvroute serve` runs and a Serve config names."""

from typing import Any

from ray.serve import Application
from ray.serve.config import RequestRouterConfig

from replica.app import Replica
from replica.logs import logging_config
from router.ingress import Router
from router.ray_cluster import deployment
from router.request_router import CacheAwareRequestRouter
from router.settings import ServeSettings

REQUESTS_EACH = 1024  # running and waiting at one replica before it refuses more
REQUESTS_WAITING = 4096  # in one router for a replica with room, before it answers 429
HEALTH_PERIOD_S = 2.0
DRAIN_LOOK_S = 0.5  # between looks whether what runs is finished


def build(args: dict[str, Any]) -> Application:
    """args: ServeSettings as a dict, with a redis_url; what is left out has its default."""
    settings = ServeSettings.model_validate(args)
    each = settings.each()
    replicas = sum(one.replicas for one in each)
    router = Router.options(  # type: ignore[attr-defined]
        num_replicas=settings.routers,
        max_ongoing_requests=REQUESTS_WAITING,
        health_check_period_s=HEALTH_PERIOD_S,
        graceful_shutdown_timeout_s=settings.drain_timeout_s,
        graceful_shutdown_wait_loop_s=DRAIN_LOOK_S,
        logging_config=logging_config(settings.log_format),
        ray_actor_options={"num_cpus": 1},
    )
    bound: Application = router.bind(
        [
            (
                one.router().model_dump(mode="json"),
                _replicas(
                    one,
                    deployment(None if len(each) == 1 else one.name),
                    beside=replicas - one.replicas,
                ),
            )
            for one in each
        ]
    )
    return bound


def _replicas(settings: ServeSettings, name: str, *, beside: int) -> Application:
    """Those of one model; beside: how many others there are."""
    replica = Replica.options(  # type: ignore[attr-defined]
        name=name,
        num_replicas=settings.replicas,
        max_ongoing_requests=REQUESTS_EACH,
        max_queued_requests=REQUESTS_WAITING,
        health_check_period_s=HEALTH_PERIOD_S,
        graceful_shutdown_timeout_s=settings.drain_timeout_s,
        graceful_shutdown_wait_loop_s=DRAIN_LOOK_S,
        logging_config=logging_config(settings.log_format),
        ray_actor_options=_resources(settings),
        request_router_config=RequestRouterConfig(
            request_router_class=CacheAwareRequestRouter,
            request_routing_stats_period_s=60.0,  # ours come through the index
        ),
    )
    bound: Application = replica.bind(settings.replica(beside=beside).model_dump(mode="json"))
    return bound


def _resources(settings: ServeSettings) -> dict[str, float]:
    """What Ray sets aside for one replica."""
    return {"num_cpus": 1, "num_gpus": settings.gpus_per_replica or 0}
