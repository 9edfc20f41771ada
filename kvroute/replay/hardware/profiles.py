"""Profiles of a replica's speed and cache: named profiles, or a JSON file with the same numbers.

The default `h200-8b` has round values near those of derived(); the others have exact results.
No named profile was measured. docs/measurements.md compares `h100-8b` with a real H100.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, NonNegativeFloat, PositiveFloat, PositiveInt
from pydantic import ValidationError as Invalid
from pydantic_core import ErrorDetails

from kvroute.prefill.speed import PrefillModel
from kvroute.replay.hardware.engine_model import (
    DISK_GB_PER_S,
    HOST_GB_PER_S,
    KV_BYTES,
    LINK_GB_PER_S,
    LINK_LATENCY_S,
    EngineModel,
)
from kvroute.settings.help import expectation

DEFAULT_ENGINE = "h200-8b"
ASSUMED = EngineModel()  # its values are the defaults of a profile

# Share of the GPU's dense BF16 peak that prefill is assumed to reach. A prompt alone reached 0.60
# (Qwen3-32B on two H100) to 0.68 (8B on one). With 0.5, a fleet that computes prompts beside
# answers is about as fast as published: 8% off behind round robin in the median, 16% behind llm-d
# (docs/measurements.md, "Published fleets").
PEAK_FLOPS_SHARE = 0.5
STEP_OVERHEAD_S = 1.5e-3  # assumed time of scheduling and kernel launches in a step
MEMORY_SHARE = 0.9  # share of a GPU's memory for weights and KV cache, as by default in vLLM
BYTES = 2  # size of a BF16 number, the type of weights and KV cache


class ProfileError(ValueError):
    """A profile cannot be used. The message says why, and what the user should write."""


class Profile(BaseModel):
    """A replay's assumptions about a replica; the defaults are those of `h200-8b`."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    prefill_tokens_per_s: PositiveFloat = ASSUMED.prefill.tokens_per_s  # speed at a prompt's start
    # Position in the prompt at which prefill has half of that speed.
    attention_tokens: PositiveFloat = ASSUMED.prefill.attention_tokens
    # EngineModel explains the next seven fields.
    step_s: PositiveFloat = ASSUMED.step_s
    expert_s: NonNegativeFloat = ASSUMED.expert_s
    expert_share: PositiveFloat = ASSUMED.expert_share
    sequence_s: NonNegativeFloat = ASSUMED.sequence_s
    context_token_s: NonNegativeFloat = ASSUMED.context_token_s
    chunk_tokens: PositiveInt = ASSUMED.chunk_tokens
    max_sequences: PositiveInt = ASSUMED.max_sequences
    kv_tokens: PositiveInt = 800_000  # tokens in the KV cache
    kv_bytes: PositiveInt = KV_BYTES  # bytes of a token's keys and values
    host_gb_per_s: PositiveFloat = HOST_GB_PER_S  # speed of copies from host memory to all GPUs
    disk_gb_per_s: PositiveFloat = DISK_GB_PER_S  # speed of reads of its disk cache
    link_gb_per_s: PositiveFloat = LINK_GB_PER_S  # bandwidth of its network link, in each direction
    link_latency_s: NonNegativeFloat = LINK_LATENCY_S  # time until the first bytes of a pull

    def engine(self) -> EngineModel:
        """Return the model of an engine with this profile."""
        return EngineModel(
            PrefillModel(self.prefill_tokens_per_s, self.attention_tokens),
            self.step_s,
            self.expert_s,
            self.expert_share,
            self.sequence_s,
            self.context_token_s,
            self.chunk_tokens,
            self.max_sequences,
        )


@dataclass(frozen=True, slots=True)
class GpuPeak:
    """The peak figures of a GPU, from its manufacturer."""

    flops: float  # dense BF16 operations per second
    memory_bytes_per_s: float
    memory_bytes: float
    host_gb_per_s: float  # speed of copies from host memory: assumed, see below


@dataclass(frozen=True, slots=True)
class Model:
    """The shape of a transformer."""

    parameters: float
    layers: int  # layers that attend to all tokens
    width: int  # query heads x head size
    kv_width: float  # key-value heads x head size
    expert_parameters: float = 0.0  # parameters of all experts; a token uses some
    expert_share: float = 1.0  # share of the experts that a token uses
    weight_bytes: float = BYTES  # bytes of a weight


# Speed of copies from pinned host memory in GB/s. Blocks are assumed to get about 80% of the link's
# bandwidth in one direction. An H100 was measured at 54 GB/s. docs/replay.md has NVIDIA's figures.
PCIE_5, PCIE_4 = 50.0, 25.0

H200 = GpuPeak(989e12, 4.8e12, 141e9, PCIE_5)  # SXM
H100 = GpuPeak(989e12, 3.35e12, 80e9, PCIE_5)  # SXM
A100 = GpuPeak(312e12, 2.039e12, 80e9, PCIE_4)  # SXM, 80 GB
L4 = GpuPeak(121e12, 0.3e12, 24e9, PCIE_4)
GPUS = {"h200": H200, "h100": H100, "a100": A100, "l4": L4}
LLAMA_8B = Model(8.03e9, layers=32, width=4096, kv_width=1024)  # Llama 3.1
LLAMA_70B = Model(70.6e9, layers=80, width=8192, kv_width=1024)


def derived(gpu: GpuPeak, model: Model, *, gpus: int = 1) -> Profile:
    """Derive the profile of a replica on `gpus` GPUs from the GPU's peak figures.

    Prefill of a token takes 2 FLOPs for each parameter that it uses, and 4 x layers x width FLOPs
    for each token before it. Both terms are equal after parameters / (2 x layers x width) tokens. A
    step reads the weights once, except for experts that none of its tokens uses, and the keys and
    values of all context tokens, at the memory's peak speed. Communication between GPUs is assumed
    to take no time. Each GPU has its own link to host memory.

    Raises:
        ProfileError: The GPUs have no memory left beside the weights.
    """
    active = model.parameters - (1 - model.expert_share) * model.expert_parameters
    weight_bytes = model.weight_bytes * model.parameters
    expert_bytes = model.weight_bytes * model.expert_parameters
    kv_bytes = 2 * BYTES * model.layers * model.kv_width  # bytes of one token
    bytes_per_s = gpus * gpu.memory_bytes_per_s
    kv_tokens = int((MEMORY_SHARE * gpus * gpu.memory_bytes - weight_bytes) / kv_bytes)
    if kv_tokens <= 0:
        raise ProfileError(
            f"the weights take {weight_bytes / 1e9:,.0f} GB, but {gpus} GPU(s) have "
            f"{MEMORY_SHARE * gpus * gpu.memory_bytes / 1e9:,.0f} GB for weights and KV cache; set "
            "a larger --gpus"
        )
    return Profile(
        prefill_tokens_per_s=gpus * PEAK_FLOPS_SHARE * gpu.flops / (2 * active),
        attention_tokens=active / (2 * model.layers * model.width),
        step_s=STEP_OVERHEAD_S + (weight_bytes - expert_bytes) / bytes_per_s,
        expert_s=expert_bytes / bytes_per_s,
        expert_share=model.expert_share,
        context_token_s=kv_bytes / bytes_per_s,
        kv_tokens=kv_tokens,
        kv_bytes=int(kv_bytes),
        host_gb_per_s=gpus * gpu.host_gb_per_s,
    )


PROFILES = {
    DEFAULT_ENGINE: Profile(),
    "h100-8b": derived(H100, LLAMA_8B),
    "a100-8b": derived(A100, LLAMA_8B),
    "l4-8b": derived(L4, LLAMA_8B),
    "h200-70b-tp4": derived(H200, LLAMA_70B, gpus=4),
    "h100-70b-tp4": derived(H100, LLAMA_70B, gpus=4),
}


def load_profile(name_or_file: str) -> Profile:
    """Return the named profile, or the profile in the file, which may be a report of gpu-check.

    Raises:
        ProfileError: There is no such profile, or the file is invalid.
    """
    if name_or_file in PROFILES:
        return PROFILES[name_or_file]
    try:
        content = Path(name_or_file).read_bytes()
    except OSError as error:
        raise ProfileError(
            f"--engine is {name_or_file!r}, which is neither a profile nor a readable file "
            f"({error.strerror}); expected one of {', '.join(PROFILES)}; with --model-config, one "
            f"of {', '.join(GPUS)}; or a JSON file such as {Profile().model_dump_json()}"
        ) from None
    if reported := re.search(rb"^- `(\{.*\})`$", content, re.MULTILINE):
        content = reported[1]
    try:
        return Profile.model_validate_json(content)
    except Invalid as invalid:
        lines = [f"{name_or_file}: {_explain(details)}" for details in invalid.errors()]
        raise ProfileError("\n".join(lines)) from None


def _explain(details: ErrorDetails) -> str:
    if not details["loc"]:
        return f"{details['msg']}; expected an object such as {Profile().model_dump_json()}"
    name = str(details["loc"][0])
    if name not in Profile.model_fields:
        return f"{name!r} is not a field of a profile; expected {', '.join(Profile.model_fields)}"
    example = Profile.model_fields[name].default
    return f"{name} is {details['input']!r}; {expectation(details['msg'])}, such as {example}"
