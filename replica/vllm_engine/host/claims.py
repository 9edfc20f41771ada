"""The speeds that are assumed for an engine at its start. Measurements correct them later.

The replica publishes them as the engine's claim.
"""

from vllm.platforms import current_platform

from kvroute.prefill.speed import PrefillModel

# Assumed speeds of prefill, on CPUs and on a GPU.
CPU_PREFILL = PrefillModel(tokens_per_s=2_000.0, attention_tokens=1_000.0)
GPU_PREFILL = PrefillModel(tokens_per_s=25_000.0, attention_tokens=32_768.0)

# Assumed speeds of copies from host memory, in bytes per second.
CPU_RELOAD = 5e9  # within the machine's memory
GPU_RELOAD = 20e9  # over PCIe


def prefill_claim() -> PrefillModel:
    """Return the assumed speed of prefill on this platform."""
    return CPU_PREFILL if current_platform.is_cpu() else GPU_PREFILL


def reload_claim() -> float:
    """Return the assumed speed of copies from host memory, in bytes per second."""
    return CPU_RELOAD if current_platform.is_cpu() else GPU_RELOAD
