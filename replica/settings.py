"""What one replica is told at its start: the builder's choices, the same for all replicas."""

from typing import Literal

from pydantic import BaseModel, ConfigDict

from replica.adapters import Adapter


class ReplicaSettings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    model: str  # as the user named it
    served_model_name: str
    revision: str = ""
    redis_url: str
    engine: Literal["vllm", "simulated"] = "vllm"
    prefix_caching: bool = True
    block_size: int = 32  # tokens
    max_model_len: int | None = None  # tokens; None: the model's own
    max_num_seqs: int | None = None  # requests in one batch; None: the engine's own
    stream_interval: int = 1  # tokens in a chunk of an answer; its first token has one of its own
    pin_share: float = 0.3  # of the KV cache, that named prefixes may take for good
    declared: tuple[str, ...] = ()  # ids of named prefixes that are there from the start
    adapters: tuple[Adapter, ...] = ()  # LoRA
    max_loras: int = 4  # of them in one batch
    max_cpu_loras: int = 16  # and in the engine's memory, if that is no less
    kv_cache_memory_mb: int = 512  # on CPUs; a GPU's free memory decides by itself
    tensor_parallel_size: int = 1
    cores: int = 1  # CPU cores that compute for one replica, where there is no GPU
    metrics: bool = True  # on a port of its own
    lease_s: float = 3.0
    simulated_prefill_tokens_per_s: float = 20_000.0  # 0: no time at all
    simulated_decode_ms: float = 10.0  # one decode step
    simulated_blocks: int = 4096

    @property
    def kept_loras(self) -> int:
        """LoRA adapters that an engine's memory is to have room for."""
        return max(self.max_loras, self.max_cpu_loras)
