"""Attached servers: the vLLM servers that the user runs and names with --attach or --attach-file.

Some options of `kvroute serve` are completed with what these servers report about themselves.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from kvroute.deployments import APPLICATION, deployment
from kvroute.local.progress import StartProgress
from kvroute.machine.problem import StartError
from kvroute.process.builtin_model import BUILTIN_MODEL
from kvroute.replica.attached_engine.server_client import ServerClient
from kvroute.replica.attached_engine.server_facts import (
    ServerError,
    ServerFacts,
    authorization,
    misfit,
    read_facts,
)
from kvroute.settings.model_settings import ModelSettings
from kvroute.settings.serve import ServeSettings, load
from kvroute.settings.server_list import listed_servers
from kvroute.store.attached_servers import AttachedServers
from kvroute.store.connection import REDIS_ERRORS, connect

READ_INTERVAL_S = 1.0  # seconds between two reads of the file of --attach-file
EVENTS_HINT = (
    'start it with --kv-events-config \'{"enable_kv_cache_events": true, "publisher": "zmq", '
    '"endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:6557"}\''
)


@dataclass(frozen=True, slots=True)
class Attached:
    """The settings of a cluster, completed with what its attached servers report."""

    settings: ServeSettings
    model: str = ""  # the model's name at the servers; empty: no server is attached
    # The servers that cannot be used, and why; the terminal shows these lines already.
    reported: Mapping[str, str] = field(default_factory=dict)


def attached(
    settings: ServeSettings,
    progress: StartProgress,
    sleep: Callable[[float], object],
    deadline: float,
) -> Attached:
    """Complete the settings with the model, its name and the block size of the attached servers.

    Options that the user has set stay as they are. Servers that do not answer, or that serve
    another model than most, are reported; kvroute uses them as soon as they can be used.

    Raises:
        StartError: No server can be used until the deadline.
    """
    if not settings.servers:
        return Attached(settings)
    count = len(settings.servers)
    asked = (
        "the server which model it serves" if count == 1 else f"{count} servers for their models"
    )
    progress.step(f"asking {asked}")
    listed = listed_servers(settings)
    listed.urls()
    if listed.problem:
        progress.warn(f"--attach-file: {listed.problem}; its other lines are used")
    found, reported = _first_answers(settings, progress, sleep, deadline)
    kinds = Counter((server.model, max(server.block_sizes)) for server in found.values())
    # If several kinds are equally frequent, this is the kind of the first server.
    ((model, block_size), _), *_ = kinds.most_common(1)
    block_size = settings.block_size or block_size
    fits = partial(misfit, model=model, block_size=block_size, adapters=())
    usable = {url: server for url, server in found.items() if not fits(url, server)}
    for url, server in found.items():
        if problem := fits(url, server):
            progress.warn(f"your server {problem}")
            reported[url] = problem
        else:
            _report(url, server, progress)
    if not usable:
        way_out = ", or leave out --block-size" if settings.block_size else ""
        raise StartError(f"--attach: {fits(*next(iter(found.items())))}{way_out}")
    first = next(iter(usable.values()))
    completed: dict[str, Any] = {
        "served_model_name": settings.served_model_name or model,
        "block_size": block_size,
    }
    if settings.model == BUILTIN_MODEL:
        completed["model"] = first.model_path
    if not settings.lora and not settings.own_replicas:  # own replicas need the files here
        completed["lora"] = _common_adapters(usable, progress)
    return Attached(load(settings.model_dump() | completed), model, reported)


def _first_answers(
    settings: ServeSettings,
    progress: StartProgress,
    sleep: Callable[[float], object],
    deadline: float,
) -> tuple[Mapping[str, ServerFacts], dict[str, str]]:
    """Ask all servers until one answers.

    Returns:
        The facts of the servers that answer, in the list's order; and why the others do not.
    """
    shown: dict[str, str] = {}
    with progress.waiting("one of your servers") as update:
        while True:
            answers = ask(settings.servers, settings.attach_key_file)
            problems = {url: str(a) for url, a in answers.items() if isinstance(a, ServerError)}
            for url, problem in problems.items():
                if shown.get(url) != problem:
                    progress.warn(f"your server {problem}")
            shown |= problems
            if len(problems) < len(answers):
                facts = {url: a for url, a in answers.items() if not isinstance(a, ServerError)}
                return facts, problems
            if time.monotonic() >= deadline:
                raise StartError("--attach: none of your servers has answered; see above")
            update("one of your servers")
            sleep(READ_INTERVAL_S)


def ask(urls: Sequence[str], key_file: Path | None) -> Mapping[str, ServerFacts | ServerError]:
    """Ask all servers at the same time, and return the facts of each, or why it does not answer.

    Raises:
        StartError: The file with the servers' API key cannot be read.
    """

    async def ask_all() -> list[ServerFacts | ServerError]:
        return [*await asyncio.gather(*(_answer(ServerClient(url, headers)) for url in urls))]

    try:
        headers = dict(authorization(key_file))
    except (OSError, UnicodeDecodeError) as error:
        raise StartError(
            f"--attach-key-file is {str(key_file)!r}, which cannot be read ({error}); give a "
            "readable file"
        ) from None
    return dict(zip(urls, asyncio.run(ask_all()), strict=True))


async def _answer(server: ServerClient) -> ServerFacts | ServerError:
    try:
        return await read_facts(server)
    except ServerError as error:
        return error
    finally:
        await server.close()


def _common_adapters(servers: Mapping[str, ServerFacts], progress: StartProgress) -> list[str]:
    """Return NAME=PATH of the LoRA adapters that all servers have; report those of some servers."""
    first, *others = servers.values()
    common = set(first.adapters).intersection(*(server.adapters for server in others))
    for url, server in servers.items():
        if rest := sorted(set(server.adapters) - common):
            progress.say(
                f"{url} serves the LoRA adapters {', '.join(rest)}, and other servers do not; "
                "clients cannot use these adapters here"
            )
    return [f"{name}={path}" for name, path in first.adapters.items() if name in common]


class AttachedFleet:
    """The attached servers of a running cluster, which come and go."""

    def __init__(
        self,
        settings: ServeSettings,
        models: Sequence[ModelSettings],
        progress: StartProgress,
        reported: Mapping[str, str],
    ) -> None:
        """Create the fleet.

        Args:
            settings: The cluster's settings.
            models: The settings of its models.
            progress: Prints which servers come and go.
            reported: Servers that cannot be used, as the terminal shows already, and why.
        """
        self._reported = {**reported}
        self._servers = listed_servers(settings)
        self._servers.urls()
        self._shown_problem = self._servers.problem  # the start has printed it
        self._can_change = bool(settings.attach_file or settings.attach_dns)
        self._models = {  # by the name of the deployment
            deployment(None if len(models) == 1 else model.served_model_name): model
            for model in models
            if model.is_attached
        }
        self._progress = progress
        self._size = len(settings.servers)
        # Servers that were reported as lost, and why, for each deployment.
        self._lost: dict[str, dict[str, str]] = {name: {} for name in self._models}
        self._next_s = 0.0  # when to look at the servers again, on the monotonic clock

    def lost(self) -> Mapping[str, int]:
        """Return the number of servers to which no requests can be sent, for each deployment.

        Print which servers are lost or back since the last call.
        """
        for name, model in self._models.items():
            with suppress(*REDIS_ERRORS):  # the routers report that Redis is away
                lost, before = asyncio.run(_lost_servers(model)), self._lost[name]
                for url, problem in lost.items():
                    if self._reported.get(url) != problem:
                        self._progress.warn(f"your server {problem}")
                        self._reported[url] = problem
                self._report_returned(before.keys() - lost.keys(), model)
                self._lost[name] = lost
        return {name: len(servers) for name, servers in self._lost.items()}

    def follow(self) -> None:
        """Print which servers are lost or back; follow the file and the names of servers."""
        if not self._models or time.monotonic() < self._next_s:
            return
        self._next_s = time.monotonic() + READ_INTERVAL_S
        self.lost()
        size = len(self._servers.urls())
        self._report_problem(self._servers.problem)
        # An empty list is a mistake, or a file that is being written.
        if not self._can_change or size in (0, self._size):
            return
        from ray.exceptions import RayError

        from kvroute.process.ray_internals import set_replicas

        with suppress(RayError, ValueError):  # the controller is away: ask it a second later
            set_replicas(APPLICATION, deployment(None), size)
            self._progress.step(f"there are {size} servers now; there were {self._size}")
            self._size = size

    def _report_problem(self, problem: str) -> None:
        """Print what is wrong with the file of --attach-file, once."""
        if problem and problem != self._shown_problem:
            self._progress.warn(
                f"--attach-file: {problem}; until this is corrected, the servers stay as they are"
            )
        self._shown_problem = problem

    def _report_returned(self, urls: Set[str], model: ModelSettings) -> None:
        """Print which of these servers, which were lost, answer again."""
        listed = [url for url in model.server_list.urls() if url in urls]
        if not listed:
            return
        try:
            answers = ask(listed, model.attach_key_file)
        except StartError as error:  # a running cluster goes on with the key that it has read
            self._progress.warn(str(error))
            return
        for url, answer in answers.items():
            if isinstance(answer, ServerFacts):
                self._reported.pop(url, None)
                self._progress.step(f"your server {url} answers, and is used again")


async def _lost_servers(model: ModelSettings) -> dict[str, str]:
    async with connect(model.redis_url) as redis:
        servers = AttachedServers(redis, model.served_model_name, cluster=model.cluster)
        return await servers.away()


def _report(url: str, server: ServerFacts, progress: StartProgress) -> None:
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
