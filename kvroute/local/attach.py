"""Attached servers: the vLLM servers that the user runs and names with --attach or --attach-file.

Some options of `kvroute serve` are completed with what these servers report about themselves.
"""

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import httpx

from kvroute.deployments import APPLICATION, deployment
from kvroute.local.progress import Progress
from kvroute.machine.problem import StartError
from kvroute.process.builtin_model import BUILTIN_MODEL
from kvroute.replica.attached_engine.server import (
    ServerError,
    ServerFacts,
    authorization,
    read_facts,
)
from kvroute.settings.serve import ServeSettings, load
from kvroute.settings.server_list import ServerList

READ_INTERVAL_S = 1.0  # seconds between two reads of the file of --attach-file
EVENTS_HINT = (
    'start it with --kv-events-config \'{"enable_kv_cache_events": true, "publisher": "zmq", '
    '"endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:6557"}\''
)


def attached(settings: ServeSettings, progress: Progress) -> ServeSettings:
    """Return the settings with the model, its name and the block size of the attached servers.

    Options that the user has set stay as they are.

    Raises:
        StartError: A server does not answer, or the servers differ.
    """
    if not settings.servers:
        return settings
    count = len(settings.servers)
    asked = (
        "the server which model it serves" if count == 1 else f"{count} servers for their models"
    )
    progress.step(f"asking {asked}")
    try:
        servers = asyncio.run(_read(settings))
    except (ServerError, OSError) as error:
        raise StartError(f"--attach: {error}") from None
    _check_equal(settings.servers, servers)
    for url, server in zip(settings.servers, servers, strict=True):
        _report(url, server, progress)
    first = servers[0]
    completed: dict[str, Any] = {
        "served_model_name": settings.served_model_name or first.model,
        "block_size": settings.block_size or first.ranks[0].block_size,
    }
    if settings.model == BUILTIN_MODEL:
        completed["model"] = first.model_path
    if not settings.lora and not settings.own_replicas:  # own replicas need the files here
        completed["lora"] = _common_adapters(settings.servers, servers, progress)
    return load(settings.model_dump() | completed)


def _common_adapters(
    urls: Sequence[str], servers: Sequence[ServerFacts], progress: Progress
) -> list[str]:
    """Return NAME=PATH of the LoRA adapters that all servers have; report those of some servers."""
    common = set(servers[0].adapters).intersection(*(server.adapters for server in servers))
    for url, server in zip(urls, servers, strict=True):
        if others := sorted(set(server.adapters) - common):
            progress.say(
                f"{url} serves the LoRA adapters {', '.join(others)}, and other servers do not; "
                "clients cannot use these adapters here"
            )
    return [f"{name}={path}" for name, path in servers[0].adapters.items() if name in common]


class AttachedFleet:
    """Keeps one replica for each server in the file of --attach-file, which may change."""

    def __init__(self, settings: ServeSettings, progress: Progress) -> None:
        self._servers = ServerList(settings.attach, settings.attach_file)
        self._has_file = settings.attach_file is not None
        self._progress = progress
        self._size = len(settings.servers)
        self._next_s = 0.0  # when to read the file again, on the monotonic clock

    def follow(self) -> None:
        """Change the number of replicas if the file lists more or fewer servers now."""
        if not self._has_file or time.monotonic() < self._next_s:
            return
        self._next_s = time.monotonic() + READ_INTERVAL_S
        size = len(self._servers.urls())
        if size in (0, self._size):  # an empty list is a mistake, or a file that is being written
            return
        self._progress.step(f"--attach-file lists {size} servers now; it listed {self._size}")
        self._size = size
        from kvroute.process.ray_internals import set_replicas

        set_replicas(APPLICATION, deployment(None), size)


async def _read(settings: ServeSettings) -> list[ServerFacts]:
    headers = dict(authorization(settings.attach_key_file))
    async with httpx.AsyncClient(headers=headers, trust_env=False) as client:
        return [*await asyncio.gather(*(read_facts(client, url) for url in settings.servers))]


def _check_equal(urls: Sequence[str], servers: Sequence[ServerFacts]) -> None:
    """Raise StartError if servers serve different models, or have blocks of different sizes."""
    # For each server: its model, then each block size of its ranks.
    kinds = [(server.model, *{rank.block_size for rank in server.ranks}) for server in servers]
    for url, kind in zip(urls, kinds, strict=True):
        if kind != kinds[0] or len(kind) != 2:
            (model, *sizes), (first, *first_sizes) = kind, kinds[0]
            raise StartError(
                f"--attach: {url} serves {model} in blocks of {sizes} tokens, and {urls[0]} serves "
                f"{first} in blocks of {first_sizes}; attach servers with the same model and "
                "--block-size"
            )


def _report(url: str, server: ServerFacts, progress: Progress) -> None:
    version = f", vLLM {server.version}" if server.version else ""
    ranks = f", {len(server.ranks)} data parallel ranks" if len(server.ranks) > 1 else ""
    progress.step(f"{url} serves {server.model}{version}{ranks}")
    if not all(rank.prefix_caching for rank in server.ranks):
        progress.say(f"{url} has no prefix caching; start it with --enable-prefix-caching")
    elif not all(rank.events for rank in server.ranks):
        progress.say(
            f"{url} publishes no KV cache events, so kvroute guesses what it has cached; "
            f"{EVENTS_HINT}"
        )
