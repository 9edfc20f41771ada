"""Binds the routers to the replicas: what `kvroute serve` runs and a Serve config names."""

import warnings
from typing import Any

from ray.serve import Application
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig

from replica.app import Replica
from replica.logs import logging_config
from router import autoscaling
from router.command.ray_cluster import deployment
from router.ingress import Router
from router.settings import ServeSettings
from router.streams.request_router import CacheAwareRequestRouter

REQUESTS_EACH = 1024  # running and waiting at one replica before it refuses more
REQUESTS_WAITING = 4096  # in one router for a replica with room, before it answers 429
HEALTH_PERIOD_S = 2.0
DRAIN_LOOK_S = 0.5  # between looks whether what runs is finished
GROW_DELAY_S = 5.0  # that too few replicas must have been too few


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
        **_size(settings),
    )
    bound: Application = replica.bind(settings.replica(beside=beside).model_dump(mode="json"))
    return bound


def _size(settings: ServeSettings) -> dict[str, Any]:
    """How many replicas there are, or who decides it."""
    if settings.max_replicas is None:
        return {"num_replicas": settings.replicas}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # what shall replace it has no effect
        config = AutoscalingConfig(
            min_replicas=settings.replicas,
            max_replicas=settings.max_replicas,
            metrics_interval_s=autoscaling.SAMPLE_S,
            look_back_period_s=autoscaling.LOOK_BACK_S,
            upscale_delay_s=GROW_DELAY_S,
            downscale_delay_s=settings.shrink_delay_s,
            policy=AutoscalingPolicy(
                policy_function=autoscaling.WaitPolicy,
                policy_kwargs={"target_wait_s": settings.target_wait_s},
            ),
        )
    return {"autoscaling_config": config}


def _resources(settings: ServeSettings) -> dict[str, float]:
    """What Ray sets aside for one replica."""
    return {"num_cpus": 1, "num_gpus": settings.gpus_per_replica or 0}
