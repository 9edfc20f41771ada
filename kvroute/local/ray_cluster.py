"""Runs a private Ray with Ray Serve on this computer, for one run of `kvroute serve`."""

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout, suppress
from pathlib import Path
from typing import Any

from kvroute.deployments import (
    APPLICATION,
    ROUTERS,
    ended_pid,
    final_error,
    is_retry,
    kind_of,
    model_of,
    of_model,
    plain,
    progress_in,
    short,
    start_error,
    traceback_in,
)
from kvroute.local.embedded_redis import REDIS_SERVER
from kvroute.local.haproxy.health import ADMIN_SOCKET
from kvroute.local.haproxy.wrapper import (
    ALLOW_ORIGIN,
    IDLE_TIMEOUT_S,
    MAX_REQUESTS,
    TLS_CERT,
    TLS_KEY,
)
from kvroute.local.ports import free_port, is_local
from kvroute.local.processes import kill_descendants
from kvroute.local.progress import StartProgress
from kvroute.local.signals import StopSignals
from kvroute.local.start_losses import StartLosses, log_of, role_of
from kvroute.machine.problem import StartError
from kvroute.process import vllm_build
from kvroute.process.metrics_port import METRICS_HOST
from kvroute.settings.owned_engine_args import options_for
from kvroute.settings.serve import ServeSettings
from kvroute.settings.serve_environment import serve_environment
from kvroute.wire.server import HOST as REPLICA_HOST

LOOPBACK = "127.0.0.1"
# Wildcard address to listen on -> loopback address at which this computer reaches the server.
WILDCARD_ADDRESSES = {"0.0.0.0": LOOPBACK, "::": "::1"}
# Number of CPUs that Ray counts, whatever the computer has. Each process reserves one of them;
# there are so many that they never limit the number of processes.
LOGICAL_CPUS = 1000
OBJECT_STORE_BYTES = 200_000_000  # size of Ray's object store, which kvroute hardly uses
SHUTDOWN_S = 10.0  # time limit in seconds for the shutdown of Serve, and again for that of Ray
POLL_S = 0.5  # seconds between two queries of Serve's status
MAX_REPORTS = 100  # the most ended processes whose lines wait for an answer of Serve's controller
SHOWN_CHARS = 4000  # how many of the last characters of a replica's error are printed


class LostProcesses:
    """Prints which replica or router has ended, and when the one in its place is ready.

    Ray reports only the id of a process that has ended, and calls `receive` in a thread of its own.
    """

    def __init__(self, logs: Path, progress: StartProgress) -> None:
        self.logs = logs  # folder of Ray's logs
        self._progress = progress
        self._pids: deque[int] = deque(maxlen=MAX_REPORTS)  # ended processes, not reported yet
        self._ended = set[str]()  # ids of ended replicas and routers, until all are replaced
        # Deployment with an ended process -> all of its processes that have run since.
        self._seen: dict[str, set[str]] = {}
        self._next_s = 0.0  # when to ask Serve's controller again, on the monotonic clock

    def receive(self, message: str) -> None:
        """Take a message that Ray would print."""
        pid = ended_pid(message)
        if pid is not None:
            self._pids.append(pid)
        elif not is_retry(message):
            self._progress.step(short(message))

    def follow(self) -> None:
        """Print what has happened since the last call, if a process has ended."""
        if not (self._pids or self._seen) or time.monotonic() < self._next_s:
            return
        self._next_s = time.monotonic() + POLL_S
        from ray.exceptions import RayError

        from kvroute.process.ray_internals import deployments

        with suppress(RayError, ValueError, KeyError):  # the controller is away: ask it later
            self.report(deployments(APPLICATION))

    def report(self, details: Mapping[str, Any]) -> None:
        """Print what these details of Serve's deployments say about processes that have ended."""
        while self._pids:
            self._report_end(self._pids.popleft(), details)
        for name, seen in [*self._seen.items()]:
            wanted, running = details[name]["target_num_replicas"], _running(details[name])
            running -= self._ended  # Serve notices their end some seconds later
            for id_ in sorted(running - seen):
                self._progress.step(
                    f"{kind_of(name)} {id_} is ready; {len(running)} of {wanted} {kind_of(name)}s"
                    f"{of_model(name)} are ready"
                )
            seen |= running
            if len(running) >= wanted:
                del self._seen[name]
        if not self._seen:
            self._ended.clear()

    def _report_end(self, pid: int, details: Mapping[str, Any]) -> None:
        for name, deployment in details.items():
            for replica in (*deployment["replicas"], *deployment.get("recent_dead_replicas", ())):
                if replica.get("pid") == pid:
                    id_ = replica["replica_id"]
                    self._progress.step(
                        f"{kind_of(name)} {id_} (process {pid}) has ended unexpectedly; Ray Serve "
                        f"starts another one; its log is {log_of(replica, self.logs)}"
                    )
                    self._ended.add(id_)
                    self._seen.setdefault(name, _running(deployment))
                    return
        self._progress.step(
            f"{role_of(pid, self.logs)} (process {pid}) has ended unexpectedly; Ray replaces it; "
            f"its output is in {self.logs}"
        )


def _running(deployment: Mapping[str, Any]) -> set[str]:
    return {
        replica["replica_id"]
        for replica in deployment["replicas"]
        if replica["state"].value == "RUNNING"
    }


@contextmanager
def local_ray(
    settings: ServeSettings,
    folder: Path,
    lost: LostProcesses,
    *,
    before_serve: Callable[[], object] = lambda: None,
) -> Iterator[None]:
    """Run Ray and Serve until the block ends. All their files are in the folder.

    Args:
        settings: The cluster's settings.
        folder: The folder.
        lost: Receives the problems that Ray reports while it runs.
        before_serve: Called when Ray runs, just before Serve listens on the cluster's port.
    """
    try:
        _start(settings, folder, lost, before_serve)
        yield
    finally:
        _stop()


def deploy(
    application: Any,
    progress: StartProgress,
    signals: StopSignals,
    deadline: float,
    lost: LostProcesses,
    *,
    not_awaited: Callable[[], Mapping[str, int]] = dict,
) -> None:
    """Deploy the application; print a line for each replica that becomes ready.

    If a router or replica ends meanwhile, Serve starts it again. The start fails if too many end.

    Args:
        application: Ray Serve's application.
        progress: Prints the lines.
        signals: The signals that end the start.
        deadline: The time at which the start has failed, on the monotonic clock.
        lost: Prints which processes end.
        not_awaited: Returns how many replicas of each deployment the start does not wait for: those
            of attached servers that cannot be used now, and those that have no GPU.

    Raises:
        StartError: A replica cannot start, or not all replicas are ready at the deadline.
    """
    from ray import serve
    from ray.exceptions import RayError

    from kvroute.process import ray_internals

    losses = StartLosses(lost.logs)
    serve.run_many(
        [serve.RunTarget(application, name=APPLICATION, external_scaler_enabled=True)],
        wait_for_ingress_deployment_creation=False,
        wait_for_applications_running=False,
    )
    shown: set[str] = set()
    with progress.waiting("Ray Serve") as update:
        while True:
            if (status := _status()) is None:
                if time.monotonic() >= deadline:
                    raise StartError(f"Ray Serve's controller is away; its logs are in {lost.logs}")
                lost.follow()
                signals.sleep(POLL_S)
                continue
            _raise_final_errors(status.deployments)
            _show(status.deployments, shown, progress)
            lost.follow()
            if status.status == "RUNNING" or _are_started(status.deployments, not_awaited()):
                return
            with suppress(RayError, ValueError, KeyError):  # the controller is busy: ask it later
                losses.update(ray_internals.deployments(APPLICATION))
            if status.status == "DEPLOY_FAILED":
                raise StartError("\n".join([start_problem(status), *losses.last()]))
            if time.monotonic() >= deadline:
                raise StartError(
                    "the cluster is not ready in time; see below, or raise --start-timeout-s\n"
                    + "\n".join([start_problem(status), *losses.last()])
                )
            update(awaited(status.deployments))
            signals.sleep(POLL_S)


def _status() -> Any:
    """Return the application's state in Serve; None while Ray replaces Serve's controller."""
    from ray import serve
    from ray.exceptions import RayError

    with suppress(RayError, KeyError):
        return serve.status().applications[APPLICATION]
    return None


def gpu_count() -> int:
    """Return the number of GPUs that Ray has found, or 0 if the installed vLLM cannot use GPUs."""
    import ray

    return int(ray.cluster_resources().get("GPU", 0)) if vllm_build.is_for_gpus() else 0


def _start(
    settings: ServeSettings, folder: Path, lost: LostProcesses, before_serve: Callable[[], object]
) -> None:
    _prepare_environment(settings, folder)
    tls = {TLS_CERT: settings.tls_cert, TLS_KEY: settings.tls_key}
    os.environ |= {name: str(path) for name, path in tls.items() if path}
    _keep_token_private()
    import ray

    from kvroute.process.logs import logging_config
    from kvroute.process.ray_internals import omit_unused_parts, redirect_messages

    try:
        omit_unused_parts()
        redirect_messages(lost.receive)
        _start_node(folder)
        _keep_token_private()
        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        before_serve()
        _start_serve(
            proxy_location="HeadOnly",
            http_options={"host": settings.host, "port": settings.port},
            logging_config=logging_config(settings.log_format),
        )
    except (ray.exceptions.RayError, RuntimeError, OSError) as error:
        raise StartError(f"Ray cannot start: {error}") from None


def _start_serve(**options: Any) -> None:
    """Start Ray Serve. If it replaces a proxy that starts slowly, connect to it again.

    On a busy computer, Serve's controller kills such a proxy and starts another one, and the call
    that waits for the first one fails. The new proxy is awaited with the rest of the cluster.
    """
    import ray
    from ray import serve

    try:
        serve.start(**options)
    except ray.exceptions.RayActorError:
        serve.start(**options)  # finds the controller, which runs already


def _start_node(folder: Path, *, attempts: int = 3) -> None:
    """Start Ray's node. After a timeout, kill its processes and try again.

    Ray's own timeout is 30 s, which is too short on a busy computer.
    """
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
    except Exception as error:  # Ray raises no narrower type
        if attempts == 1 or "timed out during startup" not in str(error):
            raise RuntimeError(str(error)) from error
        kill_descendants(spare=REDIS_SERVER)
        _start_node(folder, attempts=attempts - 1)


def _stop() -> None:
    import ray
    from ray import serve

    if not ray.is_initialized():
        return  # serve.shutdown() would first start Ray
    with open(os.devnull, "w") as silence, redirect_stdout(silence):
        # The output is dropped, because Ray reports each actor that it stops as a failed task.
        # If Serve does not shut down in time, its thread still uses Ray. Then ray.shutdown() is not
        # called, since it would end this process.
        if _within(SHUTDOWN_S, serve.shutdown):
            _within(SHUTDOWN_S, ray.shutdown)


def _raise_final_errors(deployments: Mapping[str, Any]) -> None:
    """Raise StartError if a replica reports an error with which no replica can start.

    Otherwise Serve would start replicas again and again.
    """
    for name, status in deployments.items():
        if error := final_error(status.message):
            model = model_of(name)
            options = options_for(error)
            raise StartError(
                f"vLLM cannot run {model or 'this model'} as it is configured: {error}"
                + (f"\nkvroute's options for this: {options}" if options else "")
            )


def _are_started(deployments: Mapping[str, Any], not_awaited: Mapping[str, int]) -> bool:
    """Return whether all processes run that the start waits for."""
    if ROUTERS not in deployments or not any(not_awaited.values()):
        return False
    for name, status in deployments.items():
        wanted, running = _counts(status)
        if not running or wanted - running > not_awaited.get(name, 0):
            return False
    return True


def _counts(status: Any) -> tuple[int, int]:
    """Return how many processes a deployment has, and how many of them run."""
    return sum(status.replica_states.values()), status.replica_states.get("RUNNING", 0)


def _show(deployments: Mapping[str, Any], shown: set[str], progress: StartProgress) -> None:
    """Print the lines that were not printed before, and add them to `shown`."""
    for line in _lines(deployments):
        if line not in shown:
            shown.add(line)
            progress.step(line)


def _lines(deployments: Mapping[str, Any]) -> Iterator[str]:
    for name, status in deployments.items():
        kind, wanted, running = kind_of(name), *_counts(status)
        for number in range(1, running + 1):
            yield f"{kind} {number} of {wanted}{of_model(name)} is ready"
        if error := start_error(status.message):
            yield f"{kind}{of_model(name)} cannot start yet: {error}"


def awaited(deployments: Mapping[str, Any]) -> str:
    """Return a text that says which processes are not ready yet."""
    parts = []
    for name, status in deployments.items():
        kind, wanted, running = kind_of(name), *_counts(status)
        if wanted > running:
            loads = ", which load the model" if kind.endswith("replica") else ""
            parts.append(f"{wanted - running} of {wanted} {kind}s{of_model(name)}{loads}")
    return "; ".join(parts) or "Ray Serve"


def start_problem(status: Any) -> str:
    """Return what is not ready and why, with the traceback of a process that cannot start."""
    if not status.deployments:
        return plain(status.message)[-SHOWN_CHARS:]
    lines = [f"not ready: {awaited(status.deployments)}"]
    for name, deployment in status.deployments.items():
        kind, message = f"{kind_of(name)}s{of_model(name)}", deployment.message
        if start_error(message):
            lines.append(f"{kind} cannot start:\n{traceback_in(message)[-SHOWN_CHARS:]}")
        elif said := progress_in(message):
            lines.append(f"{kind}: {said}")
    return "\n".join(lines)


def _prepare_environment(settings: ServeSettings, folder: Path) -> None:
    """Set the environment variables for Ray, which reads them when it is imported."""
    host = settings.host
    if is_local(host):
        # Ray's processes listen on the node's address, and on every address if that is not
        # loopback. Ray replaces 127.0.0.1 by another address of this computer, unless this is 0.
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    if settings.allow_origin:
        os.environ[ALLOW_ORIGIN] = ",".join(settings.allow_origin)
    os.environ |= serve_environment() | {
        # HAProxy's ports and files have fixed defaults, which would conflict between two clusters.
        # The fallback proxies of two clusters would even share ports and mix up their requests.
        "RAY_SERVE_HAPROXY_STATS_PORT": str(free_port()),
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(free_port()),
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(free_port()),
        "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT": str(free_port()),
        MAX_REQUESTS: str(settings.max_requests),
        IDLE_TIMEOUT_S: str(settings.idle_timeout_s),
        METRICS_HOST: "" if host in WILDCARD_ADDRESSES else host,
        REPLICA_HOST: LOOPBACK,
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(folder / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(folder / ADMIN_SOCKET),
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(folder / "metrics.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(folder),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(folder / "server-state"),
        # Draining is as short as possible, since no load balancer has to notice it.
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0.1",
        "RAY_SERVE_PROXY_MIN_DRAINING_PERIOD_S": "0.1",
    }


def _keep_token_private() -> None:
    """Make Ray's token unreadable to other users, who could run any program with the token."""
    with suppress(FileNotFoundError):
        (Path.home() / ".ray" / "auth_token").chmod(0o600)


def _within(seconds: float, action: Callable[[], object]) -> bool:
    """Run the action in a thread, and return whether it ends within `seconds`."""
    worker = threading.Thread(target=action, daemon=True)
    worker.start()
    worker.join(seconds)
    return not worker.is_alive()
