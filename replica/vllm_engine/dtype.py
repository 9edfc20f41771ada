"""The default dtype of the built-in model depends on whether the CPU supports bfloat16."""

from pathlib import Path

# Linux's flags for instructions that multiply bfloat16 numbers: on x86 (also AMX), on Arm.
BFLOAT16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})

CPUINFO = Path("/proc/cpuinfo")


def choose_dtype(requested: str, *, is_builtin: bool, on_cpu: bool) -> str:
    """vLLM's `dtype`. "auto" is the model's own, except for the built-in model on CPUs that only
    emulate bfloat16. There float32 is faster, and exact enough that the same prompt has the same
    greedy response, cached or not."""
    if requested == "auto" and is_builtin and on_cpu:
        return "bfloat16" if multiplies_bfloat16(CPUINFO) else "float32"
    return requested


def multiplies_bfloat16(cpuinfo: Path) -> bool:
    """Whether the CPU has instructions for bfloat16; without them products are slow."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:  # not Linux
        return False
    flags = (line.partition(":")[2] for line in lines if line.startswith(("flags", "Features")))
    return any(BFLOAT16_FLAGS & set(each.split()) for each in flags)
