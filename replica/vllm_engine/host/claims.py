"""The speeds that an engine claims at its start. Measurements correct them later."""

from vllm.platforms import current_platform

from kvroute.prefill.speed import PrefillModel

# Claimed speeds of prefill, on CPUs and on a GPU.
CPU_PREFILL = PrefillModel(tokens_per_s=2_000.0, attention_tokens=1_000.0)
GPU_PREFILL = PrefillModel(tokens_per_s=25_000.0, attention_tokens=32_768.0)

# Speeds of copies from host memory in bytes per second: within the machine's memory, and over PCIe.
CPU_RELOAD = 5e9
GPU_RELOAD = 20e9


def prefill_claim() -> PrefillModel:
    """Return the claimed speed of prefill."""
    return CPU_PREFILL if current_platform.is_cpu() else GPU_PREFILL


def reload_claim() -> float:
    """Return the claimed speed of copies from host memory, in bytes per second."""
    return CPU_RELOAD if current_platform.is_cpu() else GPU_RELOAD
