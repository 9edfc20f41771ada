"""`kvroute serve` runs a whole cluster in the foreground until a signal stops it."""

import importlib.util
import json
import os
import re
import shlex
import shutil
import socket
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from kvroute.deployments import APPLICATION, ROUTERS
from kvroute.keys import key_file
from kvroute.local.embedded_redis import check_redis, embedded_redis, without_password
from kvroute.local.guard import guarded, head_service
from kvroute.local.haproxy.health import tell_of_stop
from kvroute.local.haproxy.wrapper import check_pair
from kvroute.local.head_service import HEAD_SERVICE
from kvroute.local.last_answers import finish_answers
from kvroute.local.ports import free_port, is_local, why_not
from kvroute.local.processes import is_alive
from kvroute.local.progress import Progress, StartError
from kvroute.local.ray_cluster import EVERY_ADDRESS, deploy, gpu_count, local_ray
from kvroute.local.signals import StopSignals
from kvroute.local.vllm_check import complaints_of_vllm
from kvroute.process.builtin_model import BUILTIN_MODEL, is_converted, resolve
from kvroute.process.metrics_port import NoMetricsError, read_token
from kvroute.settings.checked_options import CheckedOptions
from kvroute.settings.model_settings import Found, ModelSettings
from kvroute.settings.serve import ServeSettings

POLL_S = 0.2
STARTS_AGAIN = "everything is being ended, then start it again"


def run(settings: ServeSettings) -> int:
    """Serves until a signal and returns 0, or 1 after a failure. It leaves no process behind."""
    private = Path(tempfile.mkdtemp(prefix="kvroute-", dir="/tmp"))  # short: it will hold sockets
    folder = private / "ray"  # Ray opens its folder to every user, and cannot open the one above
    logs = folder / "session_latest" / "logs"
    exit_code = 1
    try:
        exit_code = guarded(partial(_serve, settings, folder))
    finally:
        if exit_code == 0 or not logs.exists():
            shutil.rmtree(private, ignore_errors=True)
    return exit_code


def _serve(settings: ServeSettings, folder: Path) -> int:
    signals, progress = StopSignals(), Progress()
    with ExitStack() as running:
        try:
            _start(settings, folder, signals, progress, running)
            head = head_service()
            while is_alive(head):
                signals.sleep(POLL_S)
            progress.fail(
                f"{HEAD_SERVICE} has ended, and Ray cannot go on without it; {STARTS_AGAIN}"
            )
            os._exit(1)  # without Ray's own shutdown, which waits for what is lost
        except BaseException as error:  # a signal inside Ray can raise any exception
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
    folder: Path,
    signals: StopSignals,
    progress: Progress,
    running: ExitStack,
) -> None:
    """Returns when the cluster is ready; `running` has everything that was started."""
    deadline = time.monotonic() + settings.start_timeout_s
    refuse_taken_port(settings.host, settings.port)
    refuse_strangers(settings.host, settings.api_keys, insecure=settings.insecure)
    refuse_bad_tls(settings.tls_cert, settings.tls_key)
    refuse_bad_token(settings.metrics_token_file)
    refuse_closed_folder(settings.request_log)
    refuse_missing_engine(settings.each)
    refuse_engine_args(settings.each, progress)
    redis_url = _redis(settings, progress, running)
    models = [_model(one, progress) for one in settings.each]
    progress.step("starting Ray")
    running.enter_context(local_ray(settings, folder))
    signals.install()  # again: Ray replaced a handler
    progress.step("Ray is up")
    gpus = gpus_per_replica(settings.each, gpu_count())
    each = settings.decided(
        [Found(model, count) for model, count in zip(models, gpus, strict=True)],
        redis_url=redis_url,
        cluster=cluster_id(socket.gethostname(), settings.port),
        local_only=is_local_only(settings),
    )
    deploy(_application(settings, each), progress, signals, deadline)
    if settings.api_keys is None and not is_local(settings.host):
        progress.say(f"INSECURE: no API keys, and everybody who reaches {settings.host} is let in")
    scheme = "https" if settings.tls_cert else "http"
    url = f"{scheme}://{EVERY_ADDRESS.get(settings.host, settings.host)}:{settings.port}"
    health = _wait_until_healthy(url, signals, deadline)
    running.callback(finish_answers, _routers(), progress, within_s=settings.drain_s)
    running.callback(tell_of_stop, folder)
    progress.say(f"logs: {folder}/session_latest/logs/serve (until it stops)")
    _announce(each, url, health, progress)


def refuse_taken_port(host: str, port: int) -> None:
    """Raises StartError when the port is taken, or the address does not exist."""
    if (error := why_not(host, port)) is not None:
        raise StartError(
            f"port {port} on {host} cannot be had ({os.strerror(error.errno or 0)}); "
            f"try --port {free_port()}, or another --host"
        )


def refuse_strangers(host: str, api_keys: Path | None, *, insecure: bool) -> None:
    """Raises StartError for a file of keys that cannot be used, and for an address that others
    reach without keys."""
    if api_keys is None:
        if insecure or is_local(host):
            return
        raise StartError(
            f"--host is {host}, which others reach, and there are no API keys: give --api-keys "
            "FILE (see kvroute keys), or say --insecure"
        )
    try:
        file = key_file.read(api_keys)
    except key_file.KeyFileError as error:
        raise StartError(f"--api-keys: {error}; kvroute keys add makes one") from None
    if not file.keys:
        raise StartError(f"--api-keys: {api_keys} has no key; add one with kvroute keys add")


def is_local_only(settings: ServeSettings) -> bool:
    """Whether only this computer is to reach the cluster, and needs no keys."""
    has_guard = settings.api_keys is not None or settings.insecure
    return is_local(settings.host) and not has_guard


def refuse_bad_tls(cert: Path | None, key: Path | None) -> None:
    """Raises StartError when they are no pair."""
    if cert is None and key is None:
        return
    if cert is None or key is None:
        raise StartError("--tls-cert and --tls-key belong together; give both, or none")
    try:
        check_pair(cert, key)
    except OSError as error:  # ssl.SSLError is one
        why = error.strerror or getattr(error, "reason", None) or error
        raise StartError(
            f"--tls-cert {cert} and --tls-key {key} cannot be used ({why}); expected the PEM files "
            "of a certificate and of its key"
        ) from None


def refuse_bad_token(file: Path | None) -> None:
    """Raises StartError when there is no token in the file."""
    try:
        _ = file and read_token(file)
    except NoMetricsError as error:
        raise StartError(str(error)) from None


def refuse_closed_folder(request_log: Path | None) -> None:
    """Creates the folder. Raises StartError when it is not writable."""
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


def refuse_missing_engine(each: Sequence[CheckedOptions]) -> None:
    """Raises StartError when a model needs vLLM and it is not installed."""
    engines = {one.engine for one in each}
    if "vllm" in engines and importlib.util.find_spec("vllm") is None:
        raise StartError(
            "vLLM is not installed; run `pip install 'kvroute[gpu]'`, or 'kvroute[cpu]' with "
            "PyTorch's index for CPUs, or try --engine simulated"
        )


def refuse_engine_args(each: Sequence[CheckedOptions], progress: Progress) -> None:
    """Raises StartError when vLLM would reject the engine arguments of a model."""
    if not any(one.engine_args for one in each):
        return
    progress.step("checking --engine-args by vLLM's own types")
    for one, complaints in zip(each, complaints_of_vllm(each), strict=True):
        if complaints:
            of_model = f" of {one.name}" if len(each) > 1 else ""
            raise StartError(f"--engine-args{of_model}: " + "; ".join(complaints))


def cluster_id(host: str, port: int) -> str:
    """The default of --cluster: stable over restarts, and different for each cluster of a host."""
    return re.sub(r"[^\w.-]", "-", f"{host}-{port}")


def gpus_per_replica(each: Sequence[CheckedOptions], available: int) -> list[int]:
    """The GPUs for a replica of each model: the user's number, else 1 a rank if there are. Raises
    StartError when all replicas together need more than there are."""
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


def _gpus_wanted(settings: CheckedOptions, default: int) -> int:
    if settings.engine == "simulated":
        return 0
    ranks = settings.data_parallel_size
    return ranks * default if settings.gpus_per_replica is None else settings.gpus_per_replica


def _redis(settings: ServeSettings, progress: Progress, running: ExitStack) -> str:
    url = settings.redis_url or running.enter_context(embedded_redis())
    version = check_redis(url)
    answers = "answers" if settings.redis_url else "started"
    progress.step(f"Redis {version} {answers} at {without_password(url)}")
    return url


def _model(settings: CheckedOptions, progress: Progress) -> str:
    if settings.model == BUILTIN_MODEL and not is_converted():
        progress.step(f"preparing {BUILTIN_MODEL}, this once (about 15 s)")
    try:
        model = resolve(settings.model)
    except (ValueError, RuntimeError, ModuleNotFoundError) as error:
        raise StartError(str(error)) from None
    progress.step(f"model {model}")
    return model


def _wait_until_healthy(url: str, signals: StopSignals, deadline: float) -> dict[str, Any]:
    """What /health says then."""
    while time.monotonic() < deadline:
        try:
            # Its own address need not be the name in its certificate.
            answer = httpx.get(f"{url}/health", trust_env=False, timeout=5, verify=False)
            if answer.status_code == 200:
                return dict(answer.json())
        except httpx.TransportError:
            pass  # HAProxy is not up yet
        signals.sleep(POLL_S)
    raise StartError(f"{url}/health did not answer 200 in time; see --start-timeout-s")


def _announce(
    each: Sequence[ModelSettings], url: str, health: Mapping[str, Any], progress: Progress
) -> None:
    for one in each:
        of_model = f" ({one.served_model_name})" if len(each) > 1 else ""
        progress.say(f"reuse_cache: {one.prefix_caching}{of_model}")
    for reason, replicas in Counter(health["degraded"].values()).items():
        progress.say(f"DEGRADED: {replicas} replicas are routed to by load alone: {reason}")
    hello = [{"role": "user", "content": "Hello"}]
    body = json.dumps({"model": each[0].served_model_name, "messages": hello}, ensure_ascii=False)
    progress.say(
        f"try: curl {url}/v1/chat/completions -H 'content-type: application/json' -d "
        f"{shlex.quote(body)}"
    )
    progress.say(f"kvroute ready at {url}", style="bold green")


def _routers() -> Any:
    """Return Serve's handle of all routers."""
    from kvroute.process.ray_internals import handle_without_a_loop

    return handle_without_a_loop(APPLICATION, ROUTERS)


def _application(settings: ServeSettings, each: Sequence[ModelSettings]) -> Any:
    from kvroute.app import application  # imports Ray, whose environment is ready only now

    return application(settings, each)
