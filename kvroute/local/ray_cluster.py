"""A private Ray with Ray Serve runs on this computer for one run of `kvroute serve`."""

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout, suppress
from pathlib import Path
from typing import Any

from kvroute.deployments import APPLICATION, final_error, last_line, model_of, plain
from kvroute.local.embedded_redis import REDIS_SERVER
from kvroute.local.haproxy.health import ADMIN_SOCKET
from kvroute.local.haproxy.wrapper import IDLE_TIMEOUT_S, MOST_REQUESTS, TLS_CERT, TLS_KEY
from kvroute.local.ports import free_port
from kvroute.local.processes import kill_descendants
from kvroute.local.progress import Progress, StartError
from kvroute.local.signals import StopSignals
from kvroute.process import vllm_build
from kvroute.process.metrics_port import METRICS_HOST
from kvroute.settings.owned_engine_args import options_for
from kvroute.settings.serve import ServeSettings
from kvroute.settings.serve_environment import serve_environment
from kvroute.wire.server import HOST as REPLICA_HOST

LOOPBACK = "127.0.0.1"
EVERY_ADDRESS = {"0.0.0.0": LOOPBACK, "::": "::1"}  # to listen on -> to be reached at
LOGICAL_CPUS = 1000  # one per process; large, so that Ray's accounting limits nothing
OBJECT_STORE_BYTES = 200_000_000
SHUTDOWN_S = 10.0  # for Serve and again for Ray, before they are killed
POLL_S = 0.5  # each time Serve reports on all replicas
SHOWN_CHARS = 4000  # the end of a replica's error


@contextmanager
def local_ray(settings: ServeSettings, folder: Path) -> Iterator[None]:
    """Ray and Serve run, with all their files in the folder, until the block ends."""
    try:
        _start(settings, folder)
        yield
    finally:
        _stop()


def deploy(application: Any, progress: Progress, signals: StopSignals, deadline: float) -> None:
    """Returns when every replica of every deployment is ready, each with a line of progress.

    Raises StartError when one cannot start, or the deadline passes.
    """
    from ray import serve

    serve.run_many(
        [serve.RunTarget(application, name=APPLICATION, external_scaler_enabled=True)],
        wait_for_ingress_deployment_creation=False,
        wait_for_applications_running=False,
    )
    shown: set[str] = set()
    while time.monotonic() < deadline:
        status = serve.status().applications[APPLICATION]
        _refuse_final_errors(status.deployments)
        _show(status.deployments, shown, progress)
        if status.status == "RUNNING":
            return
        if status.status in ("DEPLOY_FAILED", "UNHEALTHY"):
            raise StartError(_reason(status))
        signals.sleep(POLL_S)
    raise StartError(f"not ready in time; see --start-timeout-s\n{_reason(status)}")


def gpu_count() -> int:
    """The GPUs that Ray sees and the installed engine can use."""
    import ray

    return int(ray.cluster_resources().get("GPU", 0)) if vllm_build.is_for_gpus() else 0


def _start(settings: ServeSettings, folder: Path) -> None:
    _prepare_environment(settings, folder)
    tls = {TLS_CERT: settings.tls_cert, TLS_KEY: settings.tls_key}
    os.environ |= {name: str(path) for name, path in tls.items() if path}
    _keep_token_private()
    import ray
    from ray import serve

    from kvroute.process.logs import logging_config
    from kvroute.process.ray_internals import start_less

    try:
        start_less()
        _start_node(folder)
        _keep_token_private()
        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        serve.start(
            proxy_location="HeadOnly",
            http_options={"host": settings.host, "port": settings.port},
            logging_config=logging_config(settings.log_format),
        )
    except (ray.exceptions.RayError, RuntimeError, OSError) as error:
        raise StartError(f"Ray does not start: {error}") from None


def _start_node(folder: Path, *, attempts: int = 3) -> None:
    """Ray gives its node 30 s to start, which is too little on a computer that is busy: then what
    has started is ended, and starts again."""
    import ray

    try:
        ray.init(
            address="local",
            namespace=APPLICATION,
            num_cpus=LOGICAL_CPUS,
            object_store_memory=OBJECT_STORE_BYTES,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            _node_ip_address=LOOPBACK,
            _temp_dir=str(folder),
        )
    except Exception as error:  # Ray raises no narrower one
        if attempts == 1 or "timed out during startup" not in str(error):
            raise RuntimeError(str(error)) from error
        kill_descendants(spare=REDIS_SERVER)
        _start_node(folder, attempts=attempts - 1)


def _stop() -> None:
    import ray
    from ray import serve

    if not ray.is_initialized():
        return  # serve.shutdown would start a Ray to stop
    with open(os.devnull, "w") as silence, redirect_stdout(silence):
        # Ray reports each actor that it stops as a failed task.
        # Ray ends a process of which a thread still uses it when it is shut down.
        if _within(SHUTDOWN_S, serve.shutdown):
            _within(SHUTDOWN_S, ray.shutdown)


def _refuse_final_errors(deployments: Mapping[str, Any]) -> None:
    """Raises StartError as soon as one replica has found that none can run its model; Serve would
    start more of them."""
    for name, status in deployments.items():
        if words := final_error(status.message):
            model = model_of(name)
            options = options_for(words)
            raise StartError(
                f"vLLM cannot run {model or 'this model'} as it is configured: {words}"
                + (f"\nkvroute's options for that: {options}" if options else "")
            )


def _show(deployments: Mapping[str, Any], shown: set[str], progress: Progress) -> None:
    """Prints new lines only: `shown` has the earlier ones."""
    for line in _lines(deployments):
        if line not in shown:
            shown.add(line)
            progress.step(line)


def _lines(deployments: Mapping[str, Any]) -> Iterator[str]:
    for name, status in deployments.items():
        who, model = name.partition(":")[0].lower(), model_of(name)
        of_model = f" of {model}" if model else ""
        wanted = sum(status.replica_states.values())
        for number in range(1, status.replica_states.get("RUNNING", 0) + 1):
            yield f"{who} {number} of {wanted}{of_model} is ready"
        if "Error:" in status.message:
            yield f"{who}{of_model} cannot start yet: {last_line(status.message)}"


def _reason(status: Any) -> str:
    """The messages of the deployments."""
    messages = [each.message for each in status.deployments.values() if each.message]
    return plain("\n".join(messages or [status.message]))[-SHOWN_CHARS:]


def _prepare_environment(settings: ServeSettings, folder: Path) -> None:
    """Ray reads these when it is imported; its processes inherit them."""
    host = settings.host
    os.environ |= serve_environment() | {
        # HAProxy's ports and files have fixed defaults, which would conflict between two clusters.
        # The proxies behind it would even share ports and serve each other's requests.
        "RAY_SERVE_HAPROXY_STATS_PORT": str(free_port()),
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(free_port()),
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(free_port()),
        "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT": str(free_port()),
        MOST_REQUESTS: str(settings.max_requests),
        IDLE_TIMEOUT_S: str(settings.idle_timeout_s),
        METRICS_HOST: "" if host in EVERY_ADDRESS else host,
        REPLICA_HOST: LOOPBACK,
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(folder / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(folder / ADMIN_SOCKET),
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(folder / "metrics.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(folder),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(folder / "server-state"),
        # No load balancer needs time to notice that this one drains.
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0.1",
        "RAY_SERVE_PROXY_MIN_DRAINING_PERIOD_S": "0.1",
    }


def _keep_token_private() -> None:
    """Ray lets every user read the token that it makes, with which one can run anything here."""
    with suppress(FileNotFoundError):
        (Path.home() / ".ray" / "auth_token").chmod(0o600)


def _within(seconds: float, action: Callable[[], object]) -> bool:
    """Whether the action has ended in that time. Processes that remain are killed later."""
    worker = threading.Thread(target=action, daemon=True)
    worker.start()
    worker.join(seconds)
    return not worker.is_alive()
