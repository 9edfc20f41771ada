"""`kvroute serve`: a whole cluster in the foreground, up with one call and gone with one signal."""

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx

from replica.model import BUILTIN_MODEL, is_converted, resolve
from router.command.embedded_redis import check_redis, embedded_redis
from router.command.ports import free_port, why_not
from router.command.processes import adopt_orphans, end_descendants
from router.command.progress import Progress, StartError
from router.command.ray_cluster import deploy, gpu_count, local_ray
from router.command.signals import StopSignals
from router.settings import ServeSettings

Builder = Callable[[dict[str, Any]], Any]  # settings as a dict -> a Ray Serve application

POLL_S = 0.2
GRACE_S = 3.0  # for processes that the orderly stop has left
EVERY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # to listen on -> to be reached at


def run(settings: ServeSettings, build: Builder | None = None) -> int:
    """Serves until a signal comes: 0 then, 1 after a failure. No process is left either way."""
    signals = StopSignals()
    adopt_orphans()
    folder = Path(tempfile.mkdtemp(prefix="kvroute-", dir="/tmp"))  # short: it will hold sockets
    logs = folder / "session_latest" / "logs"
    exit_code = 1
    try:
        exit_code = _serve(settings, build or _application, folder, signals)
    finally:
        end_descendants(grace_s=GRACE_S)
        if exit_code == 0 or not logs.exists():
            shutil.rmtree(folder, ignore_errors=True)
    return exit_code


def _serve(settings: ServeSettings, build: Builder, folder: Path, signals: StopSignals) -> int:
    progress = Progress()
    with ExitStack() as running:
        try:
            _start(settings, build, folder, signals, progress, running)
            while True:
                signals.sleep(POLL_S)
        except BaseException as error:  # a signal inside Ray comes out as anything
            if signals.has_come or isinstance(error, SystemExit):  # Ray's own SIGTERM handler
                return 0
            if not isinstance(error, StartError):
                raise
            progress.fail(str(error))
            if (folder / "session_latest").exists():
                progress.say(f"Ray's logs are in {folder}/session_latest/logs")
            return 1
        finally:
            signals.begin_stop()


def _start(
    settings: ServeSettings,
    build: Builder,
    folder: Path,
    signals: StopSignals,
    progress: Progress,
    running: ExitStack,
) -> None:
    """Returns when requests are answered; whatever runs by then is on the stack."""
    deadline = time.monotonic() + settings.start_timeout_s
    refuse_taken_port(settings.host, settings.port)
    refuse_closed_folder(settings.request_log)
    redis_url = _redis(settings, progress, running)
    models = [_model(one, progress) for one in settings.each()]
    progress.step("starting Ray")
    running.enter_context(local_ray(settings, folder))
    signals.install()  # Ray has taken one
    progress.step("Ray is up")
    chosen = _decided(settings, models).model_copy(update={"redis_url": redis_url})
    deploy(build(chosen.model_dump(mode="json")), progress, signals, deadline)
    url = f"http://{EVERY_ADDRESS.get(settings.host, settings.host)}:{settings.port}"
    _wait_until_healthy(url, signals, deadline)
    progress.say(f"logs: {folder}/session_latest/logs/serve (until it stops)")
    _announce(chosen, url, progress)


def refuse_taken_port(host: str, port: int) -> None:
    """Raises StartError when somebody listens there, or when there is no such address."""
    if (error := why_not(host, port)) is not None:
        raise StartError(
            f"port {port} on {host} cannot be had ({os.strerror(error.errno or 0)}); "
            f"try --port {free_port()}, or another --host"
        )


def refuse_closed_folder(request_log: Path | None) -> None:
    """Makes the folder. Raises StartError when nothing can be written there."""
    if request_log is None:
        return
    try:
        request_log.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=request_log).close()
    except OSError as error:
        raise StartError(
            f"--request-log is {str(request_log)!r}, and nothing can be written there "
            f"({error.strerror}); name another folder"
        ) from None


def gpus_per_replica(each: Sequence[ServeSettings], available: int) -> list[int]:
    """Of each model as asked for, else 1 where there are GPUs. Raises StartError when all together
    want more than there are."""
    default = min(1, available)
    gpus = [_gpus_wanted(settings, default) for settings in each]
    needed = sum(one.most_replicas * count for one, count in zip(each, gpus, strict=True))
    if needed > available:
        replicas = " and ".join(
            f"{one.most_replicas} replicas of {count} GPUs"
            for one, count in zip(each, gpus, strict=True)
        )
        number = "--max-replicas" if any(one.max_replicas for one in each) else "--replicas"
        raise StartError(
            f"{replicas} need {needed}, and {available} can be used here; lower {number} or "
            "--gpus-per-replica (0: CPUs)"
        )
    return gpus


def _gpus_wanted(settings: ServeSettings, default: int) -> int:
    if settings.engine == "simulated":
        return 0
    return default if settings.gpus_per_replica is None else settings.gpus_per_replica


def _decided(settings: ServeSettings, models: Sequence[str]) -> ServeSettings:
    """The same with all that a machine or a user leaves open. models: as engines load them."""
    each = settings.each()
    gpus = gpus_per_replica(each, gpu_count())
    return settings.decided(
        [
            {"model": model, "served_model_name": one.name, "gpus_per_replica": count}
            for one, model, count in zip(each, models, gpus, strict=True)
        ]
    )


def _redis(settings: ServeSettings, progress: Progress, running: ExitStack) -> str:
    url = settings.redis_url or running.enter_context(embedded_redis())
    version = check_redis(url)
    progress.step(f"Redis {version} {'answers' if settings.redis_url else 'started'} at {url}")
    return url


def _model(settings: ServeSettings, progress: Progress) -> str:
    if settings.model == BUILTIN_MODEL and not is_converted():
        progress.step(f"preparing {BUILTIN_MODEL}, this once (about 15 s)")
    try:
        model = resolve(settings.model)
    except (ValueError, RuntimeError, ModuleNotFoundError) as error:
        raise StartError(str(error)) from None
    progress.step(f"model {model}")
    return model


def _wait_until_healthy(url: str, signals: StopSignals, deadline: float) -> None:
    while time.monotonic() < deadline:
        try:
            if httpx.get(f"{url}/health", trust_env=False, timeout=5).status_code == 200:
                return
        except httpx.TransportError:
            pass  # HAProxy is not up yet
        signals.sleep(POLL_S)
    raise StartError(f"{url}/health did not answer 200 in time; see --start-timeout-s")


def _announce(settings: ServeSettings, url: str, progress: Progress) -> None:
    each = settings.each()
    for one in each:
        of_model = f" ({one.name})" if len(each) > 1 else ""
        progress.say(f"reuse_cache: {one.prefix_caching}{of_model}")
    progress.say(
        f"try: curl {url}/v1/chat/completions -H 'content-type: application/json' -d "
        f'\'{{"model": "{each[0].name}", '
        '"messages": [{"role": "user", "content": "Hello"}]}\'',
    )
    progress.say(f"kvroute ready at {url}", style="bold green")


def _application(args: dict[str, Any]) -> Any:
    from router.app import build  # imports Ray, whose environment is ready only now

    return build(args)
