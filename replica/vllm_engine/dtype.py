"""Chooses the dtype: the built-in model's default depends on the CPU's support of bfloat16."""

from pathlib import Path

# CPU flags in /proc/cpuinfo for instructions that multiply bfloat16 numbers, on x86 and on Arm.
BFLOAT16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})

CPUINFO = Path("/proc/cpuinfo")


def choose_dtype(requested: str, *, is_builtin: bool, on_cpu: bool) -> str:
    """Return vLLM's `dtype` argument.

    "auto" is the model's own dtype, except for the built-in model on CPUs that only emulate
    bfloat16. On these, float32 is faster. It is also exact enough that a prompt has the same greedy
    response whether it is cached or not.
    """
    if requested == "auto" and is_builtin and on_cpu:
        return "bfloat16" if multiplies_bfloat16(CPUINFO) else "float32"
    return requested


def multiplies_bfloat16(cpuinfo: Path) -> bool:
    """Return whether the CPU has instructions for products of bfloat16 numbers."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:  # not Linux
        return False
    flags = (line.partition(":")[2] for line in lines if line.startswith(("flags", "Features")))
    return any(BFLOAT16_FLAGS & set(line.split()) for line in flags)
