"""The checks before a start: what this machine lacks, and how `kvroute doctor` shows it."""

import json
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer
from typer.testing import CliRunner

from kvroute.cli import app
from kvroute.command.serve_command import parsed
from kvroute.local import before_start
from kvroute.local.before_start import gpu_problems
from kvroute.machine import engine_needs, gpus, machine_limits
from kvroute.machine.problem import Problem
from kvroute.settings.serve import ServeSettings, load

GIB = 1 << 30
GPU = """<gpu id="00000000:01:00.0"><product_name>NVIDIA H100</product_name><fb_memory_usage>
<total>81920 MiB</total><used>0 MiB</used><free>{free} MiB</free></fb_memory_usage></gpu>"""
LOG = """<?xml version="1.0" ?><!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v12.dtd">
<nvidia_smi_log><driver_version>570.86</driver_version><cuda_version>12.8</cuda_version>
<attached_gpus>{count}</attached_gpus>{gpus}</nvidia_smi_log>"""

Smi = Callable[..., None]  # installs a program `nvidia-smi` that runs this shell script


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Smi:
    """Return how to install a program `nvidia-smi`; the installed vLLM is the build for GPUs."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("kvroute.process.vllm_build.is_for_gpus", lambda: True)
    monkeypatch.setattr(gpus, "torch_cuda", lambda: "12.8")

    def install(script: str) -> None:
        program = tmp_path / "nvidia-smi"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)

    return install


def prints(*free_mib: int) -> str:
    """Return a script that lists GPUs of 80 GiB with this much free memory."""
    listed = "".join(GPU.format(free=free) for free in free_mib)
    return f"cat <<'END'\n{LOG.format(count=len(free_mib), gpus=listed)}\nEND"


def found(**options: object) -> list[Problem]:
    return list(gpu_problems(load({"replicas": 2, **options})))


def test_free_gpus_are_no_problem(smi: Smi) -> None:
    smi(prints(81000, 81000))
    assert found() == []


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("echo 'driver/library version mismatch' >&2; exit 18", "version mismatch"),
        ("echo 'No devices were found'; exit 6", "No devices were found"),
        (prints(), "nvidia-smi finds no GPU"),
    ],
)
def test_a_driver_that_does_not_answer_is_final(smi: Smi, script: str, why: str) -> None:
    smi(script)
    (problem,) = found()
    assert problem.is_final
    assert why in problem.text
    assert "kvroute[cpu]" in problem.text


def test_a_driver_that_hangs_is_final(smi: Smi, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "SMI_S", 0.3)
    smi("exec sleep 60")
    (problem,) = found()
    assert problem.is_final
    assert "has not answered" in problem.text


def test_without_nvidia_smi_the_device_tells(
    smi: Smi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(gpus, "DEVICE", tmp_path / "nvidiactl")
    assert "nvidia-smi is not installed" in found()[0].text
    (tmp_path / "nvidiactl").touch()
    assert found() == []


def test_an_output_that_is_not_xml_does_not_stop_the_start(smi: Smi) -> None:
    smi("echo '{}'")
    assert found() == []


def test_only_as_many_replicas_start_as_visible_gpus_allow(
    smi: Smi, monkeypatch: pytest.MonkeyPatch
) -> None:
    smi(prints(81000, 81000, 81000))
    assert found(replicas=3) == []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,2")
    (problem,) = found(replicas=3)
    assert not problem.is_final
    assert "3 GPUs for 3 replicas" in problem.text
    assert "at most 2 replicas can run" in problem.text
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "hides all GPUs" in found(replicas=1)[0].text


def test_other_gpus_than_nvidias_are_not_examined(
    smi: Smi, monkeypatch: pytest.MonkeyPatch
) -> None:
    smi("exit 1")
    monkeypatch.setattr(gpus, "torch_cuda", lambda: "")
    assert found() == []


@pytest.mark.parametrize("line", ["cuda: Optional[str] = '12.8'", "cuda = '12.8'"])
def test_the_cuda_version_of_pytorch_is_read_without_importing_it(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "version.py").write_text(f"__version__ = '2.11'\n{line}\nhip = None\n")
    spec = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: spec)
    assert gpus.torch_cuda() == "12.8"


def test_a_busy_gpu_is_a_warning_that_follows_vllms_share(smi: Smi) -> None:
    smi(prints(81000, 45000))
    (problem,) = found()
    assert not problem.is_final
    assert "GPU 1 (NVIDIA H100) has 47.2 of 85.9 GB free, and vLLM takes 92%" in problem.text
    assert found(engine_args={"gpu_memory_utilization": 0.5}) == []


def test_a_driver_older_than_pytorchs_cuda_is_final() -> None:
    old = gpus.Driver("570.86", "12.8", [gpus.Gpu("NVIDIA H100", 80 * GIB, 80 * GIB)])
    (problem,) = gpus.problems(old, share=0.9, torch_cuda="13.0")
    assert problem.is_final
    assert "570.86 supports CUDA 12.8" in problem.text
    assert "CUDA 13.0" in problem.text
    assert not list(gpus.problems(old, share=0.9, torch_cuda="12.9"))
    assert not list(gpus.problems(old, share=0.9, torch_cuda=""))


def test_simulated_engines_and_engines_on_cpus_need_no_driver(smi: Smi) -> None:
    smi("exit 1")
    assert found(engine="simulated") == []
    assert found(gpus_per_replica=0) == []


def test_caches_larger_than_the_memory_are_a_warning() -> None:
    assert not list(machine_limits.memory(7 * GIB, free=8 * GIB))
    (problem,) = machine_limits.memory(9 * GIB, free=8 * GIB)
    assert "9.7 GB" in problem.text
    assert "8.6 GB is free" in problem.text


def test_all_replicas_and_ranks_count_for_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvroute.process.vllm_build.is_for_gpus", lambda: False)
    monkeypatch.setattr(machine_limits, "memory", lambda needed: iter([Problem(str(needed))]))
    sizes = {"replicas": 2, "max_replicas": 3, "data_parallel_size": 2, "kv_cache_memory_mb": 100}
    settings = load({**sizes, "model": "another/model"})
    needed, *_ = engine_needs.memory_problems(settings.per_model, 0)
    assert needed == Problem(str(3 * 2 * 100_000_000))


def test_the_weights_of_a_local_model_count(tmp_path: Path) -> None:
    for number in range(2):
        with (tmp_path / f"model-{number}.safetensors").open("wb") as file:
            os.truncate(file.fileno(), 1000)
    assert machine_limits.weights_bytes(str(tmp_path)) == 2000
    assert machine_limits.weights_bytes("another/model") == 0


def test_a_small_shared_memory_is_a_warning_that_names_the_remedy() -> None:
    (problem,) = machine_limits.shared_memory(200_000_000, 0, free=64_000_000)
    assert "--shm-size" in problem.text
    assert not problem.is_final
    assert not list(machine_limits.shared_memory(200_000_000, 0, free=GIB))
    assert list(machine_limits.shared_memory(200_000_000, GIB, free=GIB))


def test_fewer_connections_than_requests_are_a_warning() -> None:
    assert "ulimit" in next(machine_limits.connections(1000, 2000)).text
    assert not list(machine_limits.connections(2000, 2000))


def test_options_are_read_as_kvroute_serve_reads_them() -> None:
    settings = parsed(["--engine", "simulated", "--replicas", "3"])
    assert (settings.engine, settings.replicas) == ("simulated", 3)
    assert parsed([]).model_dump() == load({}).model_dump()
    with pytest.raises(typer.BadParameter):
        parsed(["--replicas", "many"])


def test_the_doctor_lists_problems_first_and_fails_if_one_is_final(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.touch()
    options = ["--engine", "simulated", "--request-log", str(blocked / "folder")]
    shown = CliRunner().invoke(app, ["doctor", "--before-start", "--json", "--", *options])
    assert shown.exit_code == 1
    wrong = [check for check in json.loads(shown.stdout) if check["grade"] == "wrong"]
    assert [check["name"] for check in wrong] == ["request log"]
    assert "Not a directory" in wrong[0]["finding"]


def test_progress_is_not_mixed_with_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(before_start, "vllm_errors", lambda models: [[]])
    options = ["--engine-args", "enforce_eager=true"]
    shown = CliRunner().invoke(app, ["doctor", "--before-start", "--json", "--", *options])
    assert "engine arguments" in [check["name"] for check in json.loads(shown.stdout)]
    assert "checking --engine-args" in shown.stderr


def test_options_of_serve_without_before_start_are_refused() -> None:
    refused = CliRunner().invoke(app, ["doctor", "--", "--replicas", "3"])
    assert refused.exit_code == 1
    assert "--before-start" in refused.stderr


def test_each_check_of_the_doctor_is_one_of_the_start() -> None:
    names = [name for name, _ in before_start.before_start(ServeSettings(engine="simulated"))]
    assert {*before_start.OF_OPTIONS, *before_start.OF_MACHINE} < {*names}


def test_a_name_that_is_not_looked_up_in_time_is_a_problem() -> None:
    answered = threading.Event()
    (problem,) = machine_limits.own_name(lambda _: answered.wait())
    answered.set()
    assert socket.gethostname() in problem.text
    assert not problem.is_final


def test_a_name_that_is_known_or_quickly_unknown_is_no_problem() -> None:
    def unknown(name: str) -> None:
        raise socket.gaierror(f"{name} is unknown")

    assert list(machine_limits.own_name(lambda name: "127.0.1.1")) == []
    assert list(machine_limits.own_name(unknown)) == []
