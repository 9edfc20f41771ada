"""Starts a whole cluster in the foreground and runs it until a signal stops it."""

import json
import os
import re
import shlex
import shutil
import socket
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from kvroute.deployments import APPLICATION, ROUTERS
from kvroute.features import FEATURES
from kvroute.local.attach import AttachedFleet, attached
from kvroute.local.before_start import (
    OF_MACHINE,
    OF_OPTIONS,
    check_engine_args,
    check_port,
    examine,
    found_model,
    gpus_per_replica,
    waiting_for_gpus,
)
from kvroute.local.embedded_redis import (
    RedisAwayError,
    check_redis,
    embedded_redis,
    redis_warnings,
    without_password,
)
from kvroute.local.guard import guarded, leave, ray_processes
from kvroute.local.haproxy.health import fail_health_checks
from kvroute.local.last_answers import finish_answers
from kvroute.local.ports import is_local, reserve
from kvroute.local.processes import is_alive
from kvroute.local.progress import StartProgress
from kvroute.local.ray_cluster import (
    WILDCARD_ADDRESSES,
    LostProcesses,
    deploy,
    gpu_count,
    local_ray,
)
from kvroute.local.running import KEY, URL, registered
from kvroute.local.signals import StopSignals
from kvroute.machine.problem import StartError
from kvroute.process.builtin_model import BUILTIN_MODEL, is_converted
from kvroute.process.state_folder import STATE_DIR, state_folder
from kvroute.settings.checked_options import CheckedOptions
from kvroute.settings.model_settings import Detected, ModelSettings
from kvroute.settings.serve import ServeSettings
from kvroute.store.connection import WITHOUT_REDIS

POLL_S = 0.2  # seconds between two checks of Ray's processes, or of /health


def run(settings: ServeSettings) -> int:
    """Serve until a signal arrives. Return the exit code: 0, or 1 after a failure."""
    # The folder is in /tmp, because the path of a Unix socket can have at most 108 bytes.
    private = Path(tempfile.mkdtemp(prefix="kvroute-", dir="/tmp"))
    folder = private / "ray"  # Ray makes this folder readable to all users, but not its parent
    try:
        return guarded(partial(_serve, settings, folder))
    finally:
        if keep_logs(logs_in(folder), kept_logs(settings), StartProgress()):
            shutil.rmtree(private, ignore_errors=True)
        else:
            for secret in private.glob("kvroute-redis-*"):  # left by a killed process
                shutil.rmtree(secret, ignore_errors=True)


def _serve(settings: ServeSettings, folder: Path) -> int:
    signals, progress = StopSignals(), StartProgress()
    with ExitStack() as running:
        try:
            lost = LostProcesses(logs_in(folder), progress)
            servers = _start(settings, folder, signals, progress, lost, running)
            needed = ray_processes()
            while all(map(is_alive, needed)):
                signals.sleep(POLL_S)
                servers.follow()
                lost.follow()
            ended = next(name for process, name in needed.items() if not is_alive(process))
            progress.fail(
                f"{ended} has ended, and Ray cannot run without it; the cluster shuts down; then "
                "run kvroute serve again"
            )
            leave(1)  # do not call ray.shutdown(), which would wait for the lost process
        except BaseException as error:  # a signal inside Ray can raise any exception
            # Ray's own SIGTERM handler raises SystemExit.
            if signals.was_received or isinstance(error, SystemExit):
                return 0
            if not isinstance(error, StartError):
                raise
            progress.fail(str(error))
            return 1
        finally:
            signals.kill_on_next_signal()


def _start(
    settings: ServeSettings,
    folder: Path,
    signals: StopSignals,
    progress: StartProgress,
    lost: LostProcesses,
    running: ExitStack,
) -> AttachedFleet:
    """Start the cluster, and register in `running` how to stop its parts.

    Returns:
        The attached servers, which have to be followed from now on.
    """
    deadline = time.monotonic() + settings.start_timeout_s
    examine(OF_OPTIONS, settings, progress)
    port = running.enter_context(reserve(settings.host, settings.port))
    found = attached(settings, progress, signals.sleep, deadline)
    settings = found.settings
    examine(OF_MACHINE, settings, progress)
    if settings.redis_url:
        check_own_redis(settings.redis_url, progress)
    check_engine_args(settings.per_model, progress)
    paths = [_model(options, progress) for options in settings.per_model]
    redis_url = settings.redis_url or started_redis(settings, folder.parent, progress, running)
    progress.step("starting Ray")
    with progress.waiting("Ray"):
        try:
            running.enter_context(local_ray(settings, folder, lost, before_serve=port.close))
        except StartError:
            port.close()  # which this process may still hold
            check_port(settings.host, settings.port)  # another program may have taken it meanwhile
            raise
    signals.install()  # again, because Ray has replaced a handler
    progress.step("Ray is up")
    gpus = gpu_count()
    counts = gpus_per_replica(settings.per_model, gpus)
    waiting = waiting_for_gpus(settings.per_model, gpus)
    models = settings.resolve(
        [Detected(path, count, found.model) for path, count in zip(paths, counts, strict=True)],
        redis_url=redis_url,
        cluster=default_cluster(settings),
        local_only=is_local_only(settings),
    )
    servers = AttachedFleet(settings, models, progress, found.reported)
    deploy(
        _application(settings, models),
        progress,
        signals,
        deadline,
        lost,
        not_awaited=lambda: {**servers.lost(), **waiting},
    )
    if waiting:
        wanted = settings.per_model[0].fleet_size
        progress.warn(f"{sum(waiting.values())} of {wanted} replicas wait until GPUs are free")
    warn_if_insecure(settings, progress)
    url = endpoint(settings)
    with progress.waiting("a response from /health"):
        health = _wait_until_healthy(url, signals, deadline)
    running.callback(finish_answers, _routers(), progress, within_s=settings.drain_s)
    running.callback(fail_health_checks, folder)
    running.enter_context(registered(url))
    progress.say(f"logs: {logs_in(folder)}/serve")
    progress.say(f"logs after the stop: {kept_logs(settings)}")
    _report(models, health, progress)
    for line in first_steps(url, models[0].served_model_name, settings):
        progress.say(line)
    progress.say(f"kvroute ready at {url}", style="bold green")
    return servers


def is_local_only(settings: ServeSettings) -> bool:
    """Return whether the cluster has a loopback address, and neither API keys nor --insecure."""
    has_guard = settings.api_keys is not None or settings.insecure
    return is_local(settings.host) and not has_guard


def warn_if_insecure(settings: ServeSettings, progress: StartProgress) -> None:
    """Print a warning if everyone who reaches the endpoint has access."""
    if settings.api_keys is None and not is_local(settings.host):
        progress.say(
            f"INSECURE: without API keys, everyone who can reach {settings.host} has access"
        )


def endpoint(settings: ServeSettings) -> str:
    """Return the URL of the endpoint, as clients on this machine reach it."""
    scheme = "https" if settings.tls_cert else "http"
    return f"{scheme}://{WILDCARD_ADDRESSES.get(settings.host, settings.host)}:{settings.port}"


def check_own_redis(url: str, progress: StartProgress) -> None:
    """Check the user's Redis, and print a warning if the cluster has to start without it."""
    try:
        progress.step(f"Redis {check_redis(url)} answers at {without_password(url)}")
    except RedisAwayError as error:
        progress.warn(f"{error}; the cluster starts without it; {WITHOUT_REDIS}")
        return
    for warning in redis_warnings(url):
        progress.warn(warning)


def started_redis(
    settings: ServeSettings, folder: Path, progress: StartProgress, running: ExitStack
) -> str:
    """Start a Redis whose own files are in the folder, and return its URL.

    Its data are in the folder of --state-dir, or nowhere.
    """
    if settings.state_dir is not None:
        os.environ[STATE_DIR] = str(settings.state_dir)  # for this process and its children
        progress.step(f"stored data: {settings.state_dir}")
    url = running.enter_context(
        embedded_redis(progress.step, within=folder, state=settings.state_dir)
    )
    progress.step(f"Redis {check_redis(url)} started at {without_password(url)}")
    return url


def _model(settings: CheckedOptions, progress: StartProgress) -> str:
    if settings.model == BUILTIN_MODEL and not is_converted():
        progress.step(f"preparing {BUILTIN_MODEL} (about 15 s, the first time only)")
    model = found_model(settings.model)
    progress.step(f"model {model}")
    return model


def _wait_until_healthy(url: str, signals: StopSignals, deadline: float) -> dict[str, Any]:
    """Poll /health until its status is 200, and return its body."""
    while time.monotonic() < deadline:
        try:
            # The certificate is not verified, since it may be for another name than this address.
            answer = httpx.get(f"{url}/health", trust_env=False, timeout=5, verify=False)
            if answer.status_code == 200:
                return dict(answer.json())
        except httpx.TransportError:
            pass  # HAProxy is not up yet
        signals.sleep(POLL_S)
    raise StartError(
        f"{url}/health has not answered with 200 in time; see the log, or raise --start-timeout-s"
    )


def first_steps(url: str, model: str, settings: ServeSettings) -> Iterator[str]:
    """Yield lines for the user to copy: variables for other terminals, and a first request."""
    has_keys = settings.api_keys is not None
    key = f' -H "authorization: Bearer ${KEY}"' if has_keys else ""
    hello = [{"role": "user", "content": "Hello"}]
    # Without max_tokens, the answer of a simulated engine would be as long as the model's context.
    request = {"model": model, "messages": hello, "max_tokens": 40}
    body = json.dumps(request, ensure_ascii=False)
    yield "for other terminals:"
    yield f"  export {URL}={url}"
    if has_keys:
        yield f"  export {KEY}=...  # a key that kvroute keys add has printed"
    yield (
        f"try: curl {url}/v1/chat/completions -H 'content-type: application/json'{key} -d "
        f"{shlex.quote(body)}"
    )
    for feature in FEATURES:
        yield from feature.first_steps(settings, url)


def _report(
    models: Sequence[ModelSettings], health: Mapping[str, Any], progress: StartProgress
) -> None:
    for model in models:
        of_model = f" ({model.served_model_name})" if len(models) > 1 else ""
        switch = "on" if model.prefix_caching else "off"
        progress.say(f"prefix caching is {switch} (reuse_cache: {model.prefix_caching}){of_model}")
    for reason, replicas in Counter(health["degraded"].values()).items():
        progress.say(f"DEGRADED: {replicas} replicas get requests by load only: {reason}")


def _routers() -> Any:
    """Return Serve's handle of all routers."""
    from kvroute.process.ray_internals import thread_safe_handle

    return thread_safe_handle(APPLICATION, ROUTERS)


def _application(settings: ServeSettings, models: Sequence[ModelSettings]) -> Any:
    # This import comes late, since it imports Ray, which reads variables that local_ray() has set.
    from kvroute.app import application

    return application(settings, models)


def default_cluster(settings: ServeSettings) -> str:
    """Return the id of a cluster that has no --cluster.

    It is kept in the folder of --state-dir, since a container has another host name at each start.
    """
    if settings.state_dir is None:
        return cluster_id(socket.gethostname(), settings.port)
    kept = settings.state_dir / "cluster"
    with suppress(FileNotFoundError):
        if name := kept.read_text().strip():
            return name
    name = cluster_id(socket.gethostname(), settings.port)
    kept.write_text(f"{name}\n")
    return name


def cluster_id(host: str, port: int) -> str:
    """Return the default of --cluster: equal after a restart, unique among a host's clusters."""
    return re.sub(r"[^\w.-]", "-", f"{host}-{port}")


def logs_in(folder: Path) -> Path:
    """Return the folder of a running cluster's logs, which is inside Ray's folder `folder`."""
    return folder / "session_latest" / "logs"


def kept_logs(settings: ServeSettings) -> Path:
    """Return the folder to which the cluster's logs are moved after a run."""
    cluster = settings.cluster or cluster_id(socket.gethostname(), settings.port)
    return (settings.log_dir or state_folder()) / f"kvroute-logs-{cluster}"


def keep_logs(logs: Path, target: Path, progress: StartProgress) -> bool:
    """Move the logs of a run to the folder `target`, and delete the logs of the previous run there.

    Returns:
        True, or False if `target` cannot be written. Then the logs stay where they are.
    """
    if not logs.exists():
        return True
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(target, ignore_errors=True)
        shutil.move(logs.resolve(), target)
        target.chmod(0o700)  # Ray makes its folders readable to all users
    except OSError as error:
        progress.fail(f"the logs of this run stay in {logs}: {target} cannot be written ({error})")
        return False
    progress.say(f"logs of this run: {target}")
    return True
