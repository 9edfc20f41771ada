"""The Ray Serve application of routers and replicas, for `kvroute serve` and Serve configs."""

import warnings
from collections.abc import Sequence
from typing import Any

from ray.serve import Application
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig

from kvroute import autoscaling
from kvroute.deployments import OWN_REPLICAS, deployment
from kvroute.process.logs import logging_config
from kvroute.replica.deployment import Replica
from kvroute.router.connections.request_router import KnownReplicas
from kvroute.router.ingress import Router
from kvroute.settings.model_settings import ModelSettings
from kvroute.settings.serve import ServeSettings, load
from kvroute.settings.server_list import naming_only

# Serve's own limit of running requests per router. It is larger than the default of --max-requests,
# so that the router itself refuses requests.
REQUESTS_AT_ROUTER = 4096
HEALTH_PERIOD_S = 2.0  # seconds between two health checks of a process by Serve
DRAIN_CHECK_INTERVAL_S = 0.5  # seconds between two checks whether a draining process is idle
GROW_DELAY_S = 5.0  # seconds for which there must be too few replicas before one is added


def build(args: dict[str, Any]) -> Application:
    """Return the application for a Serve config file.

    Args:
        args: Options of ServeSettings, with a redis_url. Missing options come from the environment
            or have their defaults.

    Raises:
        SettingsError: A setting is invalid.
    """
    settings = load(args)
    return application(settings, settings.resolve())


def application(settings: ServeSettings, models: Sequence[ModelSettings]) -> Application:
    """Return the application: the routers, bound to the replicas of each model."""
    router = Router.options(  # type: ignore[attr-defined]
        num_replicas=settings.routers,
        max_ongoing_requests=REQUESTS_AT_ROUTER,
        health_check_period_s=HEALTH_PERIOD_S,
        graceful_shutdown_timeout_s=settings.drain_timeout_s,
        graceful_shutdown_wait_loop_s=DRAIN_CHECK_INTERVAL_S,
        logging_config=logging_config(settings.log_format),
        ray_actor_options={"num_cpus": 1},
    )
    bound: Application = router.bind(
        [
            (
                model.for_routers(),
                _fleet(
                    settings,
                    model,
                    deployment(None if len(models) == 1 else model.served_model_name),
                ),
            )
            for model in models
        ]
    )
    return bound


def _fleet(settings: ServeSettings, model: ModelSettings, name: str) -> list[Application]:
    """Return the deployments of a model: one, or two if own replicas run beside attached ones."""
    if not model.own_replicas:
        return [_replicas(settings, model, name)]
    attached = {"replicas": model.replicas - model.own_replicas, "gpus_per_replica": 0}
    own = {"replicas": model.own_replicas, **naming_only()}
    return [
        _replicas(settings, model.model_copy(update=attached), name),
        _replicas(settings, model.model_copy(update=own), OWN_REPLICAS),
    ]


def _replicas(settings: ServeSettings, model: ModelSettings, name: str) -> Application:
    replica = Replica.options(  # type: ignore[attr-defined]
        name=name,
        health_check_period_s=HEALTH_PERIOD_S,
        graceful_shutdown_timeout_s=settings.drain_timeout_s,
        graceful_shutdown_wait_loop_s=DRAIN_CHECK_INTERVAL_S,
        logging_config=logging_config(settings.log_format),
        ray_actor_options={"num_cpus": 1, "num_gpus": model.gpus_per_replica},
        request_router_config=RequestRouterConfig(
            request_router_class=KnownReplicas,
            # Serve's own polls of this data are rare: kvroute's routers ask replicas when needed.
            request_routing_stats_period_s=3600.0,
        ),
        **_size(model),
    )
    bound: Application = replica.bind(model.for_replicas())
    return bound


def _size(settings: ModelSettings) -> dict[str, Any]:
    """Return the options for a fixed number of replicas, or for autoscaling."""
    if settings.max_replicas is None:
        return {"num_replicas": settings.replicas}
    with warnings.catch_warnings():
        # Serve deprecates metrics_interval_s, but what replaces it has no effect yet.
        warnings.simplefilter("ignore", DeprecationWarning)
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
