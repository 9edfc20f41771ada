"""The options that the replicas of a model receive."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from kvroute.contract.adapters import RANKS
from kvroute.settings import parsers
from kvroute.settings.help import Option
from kvroute.settings.options.common import (
    ADAPTERS,
    ATTACH,
    ATTACHED,
    CACHE,
    ENDPOINT,
    MODEL,
    REPLICAS,
    SERVE,
    SIMULATED,
    CommonOptions,
    NotNegative,
    Positive,
)

# vLLM's names of the data types in which an engine can compute.
Dtype = Literal["auto", "half", "float16", "bfloat16", "float", "float32"]


class ReplicaOptions(CommonOptions):
    """The options that the replicas of a model receive, including the common ones."""

    dtype: Annotated[
        Dtype,
        Option(
            MODEL,
            "Data type of weights and activations. auto: the model's own type, or float32 for the "
            "built-in model on CPUs without bfloat16.",
        ),
    ] = "auto"
    replica_ports: Annotated[
        str,
        AfterValidator(parsers.checked_ports),
        Option(
            REPLICAS,
            "Range of ports; each replica listens for routers on a free one.",
            example="20000-20999",
            default="any",
        ),
    ] = ""
    max_model_len: Annotated[
        int | None,
        Positive,
        Option(
            MODEL,
            "Maximum tokens of prompt and answer together.",
            example="4096",
            default="the model's",
            basic=SERVE,
        ),
    ] = None
    max_num_seqs: Annotated[
        int | None,
        Positive,
        Option(MODEL, "Maximum requests in one batch.", example="64", default="the engine's"),
    ] = None
    stream_interval: Annotated[
        int,
        Positive,
        Option(
            ENDPOINT,
            "Tokens in one chunk of a streamed answer, after the first token. Routers need less "
            "CPU time for larger chunks.",
        ),
    ] = 1
    max_compile_s: Annotated[
        float,
        Field(gt=0, le=600),
        Option(
            MODEL,
            "Maximum CPU seconds to compile the JSON schema, regex or grammar of a request. A "
            "request that needs more gets a 400.",
        ),
    ] = 10.0
    inline_system: Annotated[
        Literal["keep", "merge"],
        Option(
            MODEL,
            "Place of system messages in the middle of a /v1/messages conversation. keep: they "
            "stay in place. merge: they move to the front, so each new one makes the cached prompt "
            "useless.",
        ),
    ] = "keep"
    prefix_caching: Annotated[
        bool,
        Option(
            CACHE,
            "Reuse the KV cache of earlier prompts with the same prefix.",
            example="1 or 0",
            flags=("--prefix-caching/--no-prefix-caching",),
            env=("REUSE_CACHE", "NIM_ENABLE_KV_CACHE_REUSE"),
        ),
    ] = True
    pin_share: Annotated[
        float,
        Field(ge=0, le=1),
        Option(
            CACHE,
            "Maximum share of the KV cache for pinned prefixes, which are never evicted. Enough "
            "blocks for one request of maximum length always stay free of pins.",
        ),
    ] = 0.3
    host_cache_gb: Annotated[
        str,
        BeforeValidator(parsers.number_as_text),
        AfterValidator(parsers.checked_size),
        Option(
            CACHE,
            "Host memory of each replica for blocks that its GPU cache evicts: a number of GB, or "
            "a percentage of the node's memory, such as 30%. The ranks of the replica share it.",
            example="64",
            basic=SERVE,
        ),
    ] = "0"
    disk_cache: Annotated[
        Path | None,
        AfterValidator(parsers.absolute),
        Option(
            CACHE,
            "Folder for blocks that host memory evicts, and that replicas use after a restart. It "
            "needs --host-cache-gb. Several replicas, also of several nodes, can share it.",
            example="/var/cache/kvroute",
            default="none",
        ),
    ] = None
    disk_cache_gb: Annotated[
        float,
        Field(gt=0, le=1e6),
        Option(CACHE, "Maximum size of the folder of --disk-cache in GB."),
    ] = 100.0
    data_parallel_size: Annotated[
        int,
        Field(ge=1, le=256),
        Option(
            REPLICAS,
            "Data parallel ranks of a replica, each with its own KV cache. The ranks share the "
            "GPUs of --gpus-per-replica.",
        ),
    ] = 1
    kv_cache_memory_mb: Annotated[
        int,
        Positive,
        Option(CACHE, "KV cache of each data parallel rank in MB, on CPUs.", basic=SERVE),
    ] = 512
    max_loras: Annotated[
        int, Positive, Option(ADAPTERS, "Maximum different adapters in one batch of a replica.")
    ] = 4
    max_cpu_loras: Annotated[
        int,
        Positive,
        Option(ADAPTERS, "Maximum adapters in a replica's memory, at least --max-loras."),
    ] = 16
    max_lora_rank: Annotated[
        int,
        Field(ge=1, le=RANKS[-1]),
        Option(
            ADAPTERS,
            "Maximum rank of the adapters of --lora-root. A replica has GPU memory for --max-loras "
            "adapters of this rank.",
        ),
    ] = 16
    engine_hooks: Annotated[
        Literal["on", "off"],
        Option(
            MODEL,
            "off: replicas run vLLM without kvroute's changes. Then there are no pins and no host "
            "memory tier, and only plain streams of a lost replica are continued (docs/attach.md). "
            "kvroute switches them off by itself if they do not fit the installed vLLM.",
        ),
    ] = "on"
    attach: Annotated[
        list[str],
        BeforeValidator(parsers.listed),
        AfterValidator(parsers.checked_urls),
        Option(
            ATTACHED,
            "Address of a vLLM server that you run. kvroute then starts no engine, but sends "
            "requests to your servers. For several, repeat the option or separate them with "
            "commas.",
            example="http://10.0.0.5:8000",
            default="none",
        ),
    ] = []  # noqa: RUF012  # pydantic copies the default
    attach_file: Annotated[
        Path | None,
        AfterValidator(parsers.absolute),
        Option(
            ATTACHED,
            "File with the addresses of your vLLM servers, one per line. kvroute reads it again "
            "when it changes, so you can add and remove servers. Every node needs the file.",
            example="servers.txt",
            default="none",
            basic=ATTACH,
        ),
    ] = None
    attach_dns: Annotated[
        list[str],
        BeforeValidator(parsers.listed),
        AfterValidator(parsers.names_with_ports),
        Option(
            ATTACHED,
            "DNS name and port of vLLM servers that you run, such as a headless service of "
            "Kubernetes. kvroute looks the name up every second, and uses the server at each of "
            "its addresses. For several, repeat the option or separate them with commas.",
            example="vllm.production.svc:8000",
            default="none",
            basic=ATTACH,
        ),
    ] = []  # noqa: RUF012  # pydantic copies the default
    attach_key_file: Annotated[
        Path | None,
        AfterValidator(parsers.absolute),
        Option(
            ATTACHED,
            "File with the API key that your vLLM servers require. Every node needs the file.",
            example="vllm-key",
            default="the servers need no key",
            basic=ATTACH,
        ),
    ] = None
    simulated_prefill_tokens_per_s: Annotated[
        float, NotNegative, Option(SIMULATED, "Prompt tokens computed per second; 0: no delay.")
    ] = 20_000.0
    simulated_decode_ms: Annotated[
        float, NotNegative, Option(SIMULATED, "Milliseconds for one token of the answer.")
    ] = 10.0
    simulated_blocks: Annotated[int, Positive, Option(SIMULATED, "Blocks in the KV cache.")] = 4096
    simulated_host_gb_per_s: Annotated[
        float,
        Field(gt=0),
        Option(SIMULATED, "Speed of copies from host memory in GB/s; a token has 131,072 bytes."),
    ] = 25.0
