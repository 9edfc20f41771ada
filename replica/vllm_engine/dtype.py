"""Chooses vLLM's dtype. For the built-in model, it depends on the CPU's support of bfloat16."""

from pathlib import Path

# Flags in /proc/cpuinfo of CPUs that have instructions to multiply bfloat16 numbers (x86 and Arm).
BFLOAT16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})

CPUINFO = Path("/proc/cpuinfo")


def choose_dtype(requested: str, *, is_builtin: bool, on_cpu: bool) -> str:
    """Return vLLM's `dtype` argument.

    "auto" is the model's own dtype, with one exception: the built-in model on a CPU that only
    emulates bfloat16 gets float32. There, float32 is faster. It is also exact enough that a prompt
    gets the same greedy response with and without a cache hit.
    """
    if requested == "auto" and is_builtin and on_cpu:
        return "bfloat16" if multiplies_bfloat16(CPUINFO) else "float32"
    return requested


def multiplies_bfloat16(cpuinfo: Path) -> bool:
    """Return whether the CPU has instructions to multiply bfloat16 numbers."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:  # not Linux
        return False
    flags = (line.partition(":")[2] for line in lines if line.startswith(("flags", "Features")))
    return any(BFLOAT16_FLAGS & set(line.split()) for line in flags)
