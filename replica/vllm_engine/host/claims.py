"""What an engine claims of its speeds before anything was measured; routers learn the real ones."""

from vllm.platforms import current_platform

from kvroute.prefill.speed import PrefillModel

CPU_PREFILL = PrefillModel(tokens_per_s=2_000.0, attention_tokens=1_000.0)
GPU_PREFILL = PrefillModel(tokens_per_s=25_000.0, attention_tokens=32_768.0)

# Bytes per s of copies from host memory: a memory's own speed, and PCIe's.
CPU_RELOAD = 5e9
GPU_RELOAD = 20e9


def prefill_claim() -> PrefillModel:
    return CPU_PREFILL if current_platform.is_cpu() else GPU_PREFILL


def reload_claim() -> float:
    return CPU_RELOAD if current_platform.is_cpu() else GPU_RELOAD
