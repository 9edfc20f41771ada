"""Runs a router and the agents of all attached servers until a signal arrives."""

import asyncio
import shutil
import tempfile
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import uvicorn
import uvloop
from starlette.types import ASGIApp

from kvroute.gateway.agents import CHECK_S, Agents
from kvroute.gateway.own_surroundings import OneProcess
from kvroute.gateway.request_ids import AnsweredIds
from kvroute.local.attach import Attached, attached
from kvroute.local.before_start import OF_OPTIONS, examine
from kvroute.local.launch import (
    check_own_redis,
    default_cluster,
    endpoint,
    first_steps,
    is_local_only,
    started_redis,
    warn_if_insecure,
)
from kvroute.local.ports import reserve
from kvroute.local.progress import StartProgress
from kvroute.local.running import registered
from kvroute.local.signals import STOPPING, Stopped, StopSignals
from kvroute.machine.problem import StartError
from kvroute.router.assembled import AssembledRouter
from kvroute.router.middleware.serve_headers import middlewares
from kvroute.settings.model_settings import Detected, ModelSettings
from kvroute.settings.replica import ReplicaSettings
from kvroute.settings.router import RouterSettings
from kvroute.settings.serve import ServeSettings
from kvroute.settings.server_list import names_servers


def run(settings: ServeSettings) -> int:
    """Serve until a signal arrives. Return the exit code: 0, or 1 if the start failed."""
    signals, progress = StopSignals(), StartProgress()
    private = Path(tempfile.mkdtemp(prefix="kvroute-", dir="/tmp"))
    try:
        with ExitStack() as running:
            return _serve(settings, private, signals, progress, running)
    except StartError as error:
        progress.fail(str(error))
        return 1
    except (Stopped, KeyboardInterrupt):
        return 0
    finally:
        shutil.rmtree(private, ignore_errors=True)


def _serve(
    settings: ServeSettings,
    private: Path,
    signals: StopSignals,
    progress: StartProgress,
    running: ExitStack,
) -> int:
    _check(settings)
    examine(OF_OPTIONS, settings, progress)
    port = running.enter_context(reserve(settings.host, settings.port))
    deadline = time.monotonic() + settings.start_timeout_s
    found = attached(settings, progress, signals.sleep, deadline)
    if settings.redis_url:
        check_own_redis(settings.redis_url, progress)
    model = _model(found, settings.redis_url or started_redis(settings, private, progress, running))
    port.close()
    return uvloop.run(_run(found.settings, model, signals, progress))


def _check(settings: ServeSettings) -> None:
    """Check that there are servers, and that no option needs a cluster. Raises StartError."""
    if not names_servers(settings):
        raise StartError(
            "there are no servers; run kvroute attach http://HOST:PORT, with the address of each "
            "vLLM server, or name a file of addresses with --attach-file, or a DNS name with "
            "--attach-dns"
        )
    needs = {
        "--own-replicas": settings.own_replicas,
        f"--routers {settings.routers}": settings.routers > 1,
        "serving several models": len(settings.per_model) > 1,
        "--wire-tls": settings.wire_tls,
    }
    for what, is_wanted in needs.items():
        if is_wanted:
            raise StartError(
                f"{what} needs a cluster, and kvroute attach starts none; use kvroute serve "
                "--attach URL with the same options"
            )


def _model(found: Attached, redis_url: str) -> ModelSettings:
    settings = found.settings
    (model,) = settings.resolve(
        [Detected(settings.per_model[0].model, 0, found.model)],
        redis_url=redis_url,
        cluster=default_cluster(settings),
        local_only=is_local_only(settings),
    )
    return model


async def _run(
    settings: ServeSettings, model: ModelSettings, signals: StopSignals, progress: StartProgress
) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in STOPPING:
        loop.add_signal_handler(number, stop.set)
    if signals.was_received:  # native code has dropped the exception of its handler
        stop.set()
    stopping = asyncio.create_task(stop.wait(), name="stop")
    surroundings = OneProcess(settings.host, model.cluster)
    # The agents go on while the router ends, since its last answers need them.
    around_agents = OneProcess(settings.host, model.cluster)
    agents = Agents(ReplicaSettings.model_validate(model.for_replicas()), around_agents)
    following = asyncio.create_task(agents.run(), name="agents")
    own = RouterSettings.model_validate(model.for_routers())
    starting = asyncio.create_task(
        AssembledRouter.start([(own, agents)], surroundings), name="router"
    )
    await asyncio.wait([starting, stopping], return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():
        starting.cancel()
        following.cancel()
        await asyncio.gather(starting, following, return_exceptions=True)
        return 0
    router = starting.result()
    server = _http_server(router, settings)
    serving = asyncio.create_task(_quietly(server), name="http")
    checking = asyncio.create_task(_check_tasks(router), name="checks")
    ends = [serving, following, stopping, checking]
    ready, url = asyncio.create_task(_ready(server, agents), name="ready"), endpoint(settings)
    with registered(url):
        await asyncio.wait([ready, *ends], return_when=asyncio.FIRST_COMPLETED)
        if ready.done():
            warn_if_insecure(settings, progress)
            for line in first_steps(url, model.served_model_name, settings):
                progress.say(line)
            progress.say(f"kvroute ready at {url}", style="bold green")
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    failed = [task for task in ends if task.done() and task is not stopping]
    for part in failed:
        progress.fail(f"a part of kvroute has ended ({part.get_name()}): {part.exception()!r}")
    for number in STOPPING:
        loop.remove_signal_handler(number)
    surroundings.drain()
    if await router.stop():
        progress.step("waiting for the running answers")
    server.should_exit = True
    with suppress(TimeoutError):
        async with asyncio.timeout(settings.drain_s):
            await asyncio.shield(serving)
    router.end_answers()
    await router.close()
    for running in (following, stopping, checking, ready):
        running.cancel()
    await asyncio.gather(*ends, ready, return_exceptions=True)
    return 1 if failed else 0


def _http_server(router: AssembledRouter, settings: ServeSettings) -> uvicorn.Server:
    """Return the HTTP server of the endpoint, which does not run yet."""
    return uvicorn.Server(
        uvicorn.Config(
            _served(router),
            host=settings.host,
            port=settings.port,
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=round(settings.idle_timeout_s),
            ssl_certfile=settings.tls_cert,
            ssl_keyfile=settings.tls_key,
        )
    )


def _served(router: AssembledRouter) -> ASGIApp:
    """Return the application of a router, with what Ray Serve and HAProxy would add to it."""
    app: ASGIApp = AnsweredIds(router.application())
    for middleware in reversed(middlewares()):
        app = middleware.cls(app, *middleware.args, **middleware.kwargs)
    return app


async def _quietly(server: uvicorn.Server) -> None:
    """Serve without uvicorn's own signal handlers."""
    await server._serve()


async def _check_tasks(router: AssembledRouter) -> None:
    """Raise the error of a background task of the router when one has ended."""
    while True:
        router.check()
        await asyncio.sleep(CHECK_S)


async def _ready(server: uvicorn.Server, agents: Agents) -> None:
    """Wait until the endpoint listens and at least one server can be used."""
    while not (server.started and agents.ids()):
        await asyncio.sleep(0.02)
