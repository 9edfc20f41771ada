"""Examines the NVIDIA GPUs of this machine, through the command nvidia-smi."""

import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from kvroute.machine.problem import Problem

SMI_S = 30.0  # seconds that nvidia-smi may take; with a driver that hangs it never ends
DEVICE = Path("/dev/nvidiactl")  # exists if a driver is loaded, also where nvidia-smi is missing
# The share of a GPU's memory that vLLM takes unless gpu_memory_utilization is set (vllm/config/
# cache.py); vLLM refuses to start if less is free.
DEFAULT_SHARE = 0.92
CPUS = "install 'kvroute[cpu]' to compute on CPUs, or try --engine simulated"


@dataclass(frozen=True)
class Gpu:
    """A GPU, and its memory in bytes."""

    name: str
    total: int
    free: int


@dataclass(frozen=True)
class Driver:
    """The driver, the newest CUDA version that it supports ("12.8"), and the GPUs that it runs."""

    version: str
    cuda: str
    gpus: Sequence[Gpu]


class SilentDriverError(RuntimeError):
    """The driver does not answer. The message says why."""


def driver() -> Driver | None:
    """Return the driver with its GPUs; None: nvidia-smi is missing, but there is a driver.

    Raises:
        SilentDriverError: There is no driver, or it does not answer.
    """
    program = shutil.which("nvidia-smi")
    if program is None:
        if DEVICE.exists():
            return None
        raise SilentDriverError("nvidia-smi is not installed")
    try:
        ran = subprocess.run(
            [program, "-q", "-x"], capture_output=True, text=True, timeout=SMI_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise SilentDriverError(f"nvidia-smi has not answered within {SMI_S:.0f} s") from None
    except OSError as error:
        raise SilentDriverError(f"nvidia-smi cannot run: {error.strerror}") from None
    if ran.returncode != 0:
        said = (ran.stderr or ran.stdout).strip().splitlines() or [f"exit code {ran.returncode}"]
        raise SilentDriverError(f"nvidia-smi: {said[0]}")
    try:
        return _parse(ran.stdout)
    except ElementTree.ParseError:
        return None  # a version with another output; the engine examines the GPUs itself


def _parse(text: str) -> Driver:
    log = ElementTree.fromstring(text)
    gpus = [
        Gpu(
            gpu.findtext("product_name", "GPU"),
            _bytes(gpu.findtext("fb_memory_usage/total", "")),
            _bytes(gpu.findtext("fb_memory_usage/free", "")),
        )
        for gpu in log.findall("gpu")
    ]
    return Driver(log.findtext("driver_version", ""), log.findtext("cuda_version", ""), gpus)


def _bytes(text: str) -> int:
    """Return the bytes of a text such as "81559 MiB"; 0 if it is not known."""
    match = re.fullmatch(r"\s*(\d+) MiB\s*", text)
    return int(match[1]) << 20 if match else 0


def usable(found: Driver) -> int:
    """Return how many GPUs a process of this user sees: all, or those of CUDA_VISIBLE_DEVICES.

    Raises:
        SilentDriverError: There is none.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if not found.gpus:
        raise SilentDriverError("nvidia-smi finds no GPU")
    if visible is None:
        return len(found.gpus)
    if names := [name for name in visible.split(",") if name.strip() not in ("", "-1")]:
        return len(names)
    raise SilentDriverError(f"CUDA_VISIBLE_DEVICES is {visible!r} and hides all GPUs")


def problems(found: Driver, *, share: float, torch_cuda: str) -> Iterator[Problem]:
    """Yield what keeps vLLM from running on these GPUs.

    Args:
        found: the driver and its GPUs.
        share: the share of a GPU's memory that vLLM will take.
        torch_cuda: the CUDA version that the installed PyTorch is built for; empty: unknown.
    """
    if _major(found.cuda) < _major(torch_cuda):
        yield Problem(
            f"NVIDIA's driver {found.version} supports CUDA {found.cuda}, and the installed "
            f"PyTorch is built for CUDA {torch_cuda}; update the driver, or install builds of "
            f"PyTorch and vLLM for CUDA {_major(found.cuda)}",
            is_final=True,
        )
    for number, gpu in enumerate(found.gpus):
        if gpu.free < share * gpu.total:
            yield Problem(
                f"GPU {number} ({gpu.name}) has {gpu.free / 1e9:.1f} of {gpu.total / 1e9:.1f} GB "
                f"free, and vLLM takes {share:.0%}; end the processes that nvidia-smi lists, or "
                "set a lower gpu_memory_utilization in --engine-args"
            )


def _major(version: str) -> int:
    """Return the first number of a version; 0 if it is not known."""
    match = re.match(r"\d+", version)
    return int(match[0]) if match else 0


def torch_cuda() -> str:
    """Return the CUDA version that PyTorch is built for, without importing it; empty: unknown."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return ""
    file = Path(spec.origin).with_name("version.py")
    text = file.read_text() if file.is_file() else ""
    match = re.search(r"^cuda\b[^=]*= '([\d.]+)'", text, re.MULTILINE)
    return match[1] if match else ""


def no_gpu(why: str) -> Problem:
    """Return the problem that vLLM's build for GPUs is installed, and no driver answers."""
    return Problem(
        "vLLM's build for GPUs is installed, and it finds no GPU that it can use "
        f"({why}); install NVIDIA's driver, or give the container its GPUs (docker run --gpus "
        f"all), or {CPUS}",
        is_final=True,
    )
