"""The dtype of the built-in model on different CPUs; the user's choice is always used."""

from pathlib import Path

import pytest

from kvroute.replica.vllm_engine import dtype
from kvroute.replica.vllm_engine.dtype import choose_dtype, multiplies_bfloat16

XEON_OF_2019 = "processor\t: 0\nflags\t\t: fpu avx2 avx512f avx512bw avx512_vnni\n"
XEON_OF_2023 = "processor\t: 0\nflags\t\t: fpu avx512f avx512_bf16 amx_bf16 amx_tile amx_int8\n"
EPYC_OF_2022 = "processor\t: 0\nflags\t\t: fpu avx2 avx512f avx512_bf16\n"
GRAVITON_3 = "processor\t: 0\nFeatures\t: fp asimd sve i8mm bf16 dgh\n"
GRAVITON_2 = "processor\t: 0\nFeatures\t: fp asimd fphp asimdhp\n"


@pytest.fixture
def cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "cpuinfo"
    monkeypatch.setattr(dtype, "CPUINFO", file)
    return file


@pytest.mark.parametrize("cpuinfo", [XEON_OF_2023, EPYC_OF_2022, GRAVITON_3])
def test_a_cpu_that_multiplies_bfloat16_is_recognised(cpu: Path, cpuinfo: str) -> None:
    cpu.write_text(cpuinfo)
    assert multiplies_bfloat16(cpu)
    assert choose_dtype("auto", is_builtin=True, on_cpu=True) == "bfloat16"


@pytest.mark.parametrize("cpuinfo", [XEON_OF_2019, GRAVITON_2])
def test_on_other_cpus_the_builtin_model_has_float32(cpu: Path, cpuinfo: str) -> None:
    cpu.write_text(cpuinfo)
    assert not multiplies_bfloat16(cpu)
    assert choose_dtype("auto", is_builtin=True, on_cpu=True) == "float32"


def test_the_builtin_model_has_float32_if_the_cpu_is_unknown(cpu: Path) -> None:
    assert choose_dtype("auto", is_builtin=True, on_cpu=True) == "float32"


def test_other_models_and_gpus_have_vllms_own_default(cpu: Path) -> None:
    cpu.write_text(XEON_OF_2019)
    assert choose_dtype("auto", is_builtin=False, on_cpu=True) == "auto"
    assert choose_dtype("auto", is_builtin=True, on_cpu=False) == "auto"


@pytest.mark.parametrize("asked", ["float32", "bfloat16"])
def test_the_users_dtype_is_used(cpu: Path, asked: str) -> None:
    cpu.write_text(XEON_OF_2019)
    assert choose_dtype(asked, is_builtin=True, on_cpu=True) == asked
