"""Compares what the engines of a fleet need with this machine."""

from collections.abc import Iterator, Sequence

from kvroute.local.haproxy.connections import max_connections
from kvroute.machine import gpus, machine_limits
from kvroute.machine.problem import Problem
from kvroute.process import vllm_build
from kvroute.process.memory import memory_bytes
from kvroute.settings.checked_options import CheckedOptions
from kvroute.settings.parsers import size_bytes

MB = 1_000_000


def engines_of(models: Sequence[CheckedOptions]) -> list[tuple[CheckedOptions, int]]:
    """Return each model that runs vLLM on this machine, and its number of replicas."""
    return [
        (model, model.own_fleet_size)
        for model in models
        if model.engine == "vllm" and model.starts_engines
    ]


def gpu_problems(models: Sequence[CheckedOptions], found: gpus.Driver) -> Iterator[Problem]:
    """Yield why vLLM cannot run on these GPUs; vLLM is the build for GPUs."""
    shares = (model.engine_args.get("gpu_memory_utilization") for model, _ in engines_of(models))
    numbers = [share for share in shares if isinstance(share, float)] or [gpus.DEFAULT_SHARE]
    yield from gpus.problems(found, share=min(numbers), torch_cuda=gpus.torch_cuda())


def memory_problems(models: Sequence[CheckedOptions], object_store: int) -> Iterator[Problem]:
    """Yield why the memory or the shared memory of this machine is too small for the fleet.

    Args:
        models: the options of each model.
        object_store: bytes of Ray's object store.
    """
    on_cpus, host = 0, 0
    for model, replicas in engines_of(models):
        host += replicas * size_bytes(model.host_cache_gb, of_bytes=memory_bytes())
        if not vllm_build.is_for_gpus():
            caches = model.data_parallel_size * model.kv_cache_memory_mb * MB
            on_cpus += replicas * (caches + machine_limits.weights_bytes(model.model))
    yield from machine_limits.memory(on_cpus + host)
    yield from machine_limits.shared_memory(object_store, host)


def connection_problems(routers: int, max_requests: int) -> Iterator[Problem]:
    """Yield a problem if the load balancer cannot hold a connection for each request."""
    yield from machine_limits.connections(max_connections(), routers * max_requests)
