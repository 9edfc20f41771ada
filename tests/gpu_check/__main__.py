"""Measures kvroute on this machine's GPUs and writes a report: `make gpu-check`.

It needs no network and no model: the weights are random. On a machine without GPUs,
`make gpu-check ARGS=--cpu` runs the same steps with the built-in model, to check the command.
"""

import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from kvroute.process import vllm_build
from tests.gpu_check.cluster import Sizes, measure_cluster
from tests.gpu_check.model import write_model

ENGINE_S = 900.0  # timeout in seconds of the engine's own measurement
GPU_LENGTHS, CPU_LENGTHS = (1_000, 4_000, 12_000, 24_000), (200, 600)
# Numbers of sequences in a step, with the tokens of the context of each.
GPU_BATCHES = ((1, 500), (8, 500), (32, 500), (64, 500), (8, 8_000))
CPU_BATCHES = ((1, 100), (4, 100), (4, 400))
CONTEXT = 40_000  # maximum length of a prompt and its answer on GPUs, in tokens
# Arguments of vLLM on GPUs. A cache of 12.5 GB holds 95,000 tokens of the 8B model, on every GPU,
# so that the documents of this check fit into both caches together but not into one.
ENGINE_ARGS = {"load_format": "dummy", "kv_cache_memory_bytes": 12_500_000_000}
SHARED_GPU_ARGS = {"gpu_memory_utilization": 0.42}  # two engines share the memory of one GPU
GPU_OPTIONS = ("--host-cache-gb", "8", "--max-model-len", str(CONTEXT))
CPU_OPTIONS = (
    *("--dtype", "float32", "--max-model-len", "1024"),
    *("--kv-cache-memory-mb", "64", "--host-cache-gb", "0.03"),
)


GPU_SIZES = Sizes(GPU_LENGTHS, documents=24, questions=5, document_tokens=8_000, answer_tokens=200)
CPU_SIZES = Sizes(CPU_LENGTHS, documents=8, questions=3, document_tokens=300, answer_tokens=40)


def main(
    cpu: Annotated[
        bool, typer.Option("--cpu", help="Use the built-in model on CPUs; checks the command only.")
    ] = False,
    write: Annotated[
        Path | None, typer.Option(help="File for the report.", show_default="stdout only")
    ] = None,
    engine_args: Annotated[
        str, typer.Option(help="More arguments of vLLM, as for kvroute serve.", metavar="JSON")
    ] = "{}",
) -> None:
    """Measure the engine alone, then two replicas behind kvroute and behind round robin."""
    if not cpu and not gpu_names():
        raise SystemExit("nvidia-smi finds no GPU; use --cpu to check the command without one")
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        lines = []
        for line in report(folder, json.loads(engine_args), cpu=cpu):
            print(line, flush=True)
            lines.append(line)
    if write is not None:
        write.write_text("\n".join(lines) + "\n")


def gpu_names() -> list[str]:
    """Return the names of this machine's GPUs and their driver."""
    command = [
        "nvidia-smi",
        "--query-gpu=name,memory.total,driver_version",
        "--format=csv,noheader",
    ]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return []
    return answer.stdout.strip().splitlines()


def report(folder: Path, more_args: Mapping[str, object], *, cpu: bool) -> Iterator[str]:
    """Yield the report's lines, in Markdown, as they are measured."""
    gpus = [] if cpu else gpu_names()
    machine = "; ".join(gpus) or f"CPUs only ({platform.processor() or platform.machine()})"
    yield "# GPU check"
    yield ""
    now = datetime.now(UTC)
    yield f"{now:%Y-%m-%d %H:%M} UTC. {machine}. vLLM {vllm_build.installed_version()}."
    yield ""
    model = None if cpu else write_model(folder / "model")
    yield from step("The engine alone", lambda: measure_engine(model, more_args, cpu=cpu))
    options = [*(CPU_OPTIONS if cpu else GPU_OPTIONS)]
    engine_args = dict(more_args)
    if model is not None:
        options += ["--model", str(model)]
        engine_args = ENGINE_ARGS | (SHARED_GPU_ARGS if len(gpus) == 1 else {}) | engine_args
    options += ["--engine-args", json.dumps(engine_args)]
    for policy in ("kvroute", "round-robin"):
        measure = partial(
            measure_cluster,
            (*options, "--policy", policy),
            CPU_SIZES if cpu else GPU_SIZES,
            shares_gpu=len(gpus) == 1,
            is_ours=policy == "kvroute",
        )
        yield from step(f"Two replicas, policy {policy}", measure)


def step(title: str, measure: Callable[[], Iterator[str]]) -> Iterator[str]:
    """Yield a section of the report. A step that fails does not end the report."""
    yield f"## {title}"
    yield ""
    start_s = time.monotonic()
    try:
        yield from measure()
    except Exception as error:  # the other steps may work
        yield f"- FAILED: {type(error).__name__}: {str(error)[:500]}"
    yield f"- took {time.monotonic() - start_s:.0f} s"
    yield ""


def measure_engine(
    model: Path | None, more_args: Mapping[str, object], *, cpu: bool
) -> Iterator[str]:
    """Yield what tests/gpu_check/engine.py prints in a process of its own."""
    settings = {
        "model": model and str(model),
        "lengths": CPU_LENGTHS if cpu else GPU_LENGTHS,
        "batches": CPU_BATCHES if cpu else GPU_BATCHES,
        "engine_args": {**({} if cpu else {"max_model_len": CONTEXT}), **more_args},
    }
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.gpu_check.engine", json.dumps(settings)],
        capture_output=True,
        text=True,
        timeout=ENGINE_S,
    )
    if done.returncode:
        raise RuntimeError(done.stderr.strip()[-500:])
    yield from (line for line in done.stdout.splitlines() if line.startswith(("- ", "  ")))


if __name__ == "__main__":
    typer.run(main)
