"""Every choice a user has, defined once: the command line and the environment follow from here."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from replica.model import BUILTIN_MODEL
from router.command import given
from router.command.options import Environment, Option, option

CPU_BLOCK_SIZE = 32  # tokens
GPU_BLOCK_SIZE = 16  # tokens

MODEL = "Model"
CLUSTER = "Cluster"
CACHE = "KV cache"
PREFIXES = "Named prefixes"
ADAPTERS = "LoRA adapters"
SIMULATED = "Simulated engine (--engine simulated)"

Positive = Field(ge=1)
NotNegative = Field(ge=0)


class Choices(BaseSettings):
    """What `kvroute serve` serves, and how. Command line, else environment, else default."""

    model_config = SettingsConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    model: Annotated[
        str,
        BeforeValidator(given.joined),
        Option(
            MODEL,
            "Built-in model, local folder or hub name; several with commas in between, or one "
            "--model each.",
            kind=list[str],
        ),
    ] = BUILTIN_MODEL
    models: Annotated[
        list[dict[str, Any]],
        BeforeValidator(given.from_json),
        Option(
            CLUSTER,
            "Several models, each with settings of its own, as JSON.",
            example='[{"model": "Qwen/Qwen3-8B", "replicas": 4}, {"model": "Qwen/Qwen3-0.6B"}]',
            default="none",
            kind=str,
        ),
    ] = []
    served_model_name: Annotated[
        str | None,
        Option(MODEL, "Name by which clients ask for the model.", default="same as --model"),
    ] = None
    revision: Annotated[
        str,
        Option(MODEL, "Version of the model; replicas of different ones share no prefixes."),
    ] = ""
    engine: Annotated[
        Literal["vllm", "simulated"],
        Option(MODEL, "vllm, or simulated: modelled time and no model."),
    ] = "vllm"
    max_model_len: Annotated[
        int | None,
        Positive,
        Option(
            MODEL, "Tokens of prompt and answer together.", example="4096", default="the model's"
        ),
    ] = None

    replicas: Annotated[int, Positive, Option(CLUSTER, "Engines, each with its own cache.")] = 2
    max_replicas: Annotated[
        int | None,
        Positive,
        Option(
            CLUSTER,
            "The most replicas; the fleet then finds its size by its load, and --replicas is the "
            "least.",
            example="8",
            default="as many as --replicas",
        ),
    ] = None
    target_wait_s: Annotated[
        float,
        Field(gt=0),
        Option(CLUSTER, "Seconds in a queue above which the fleet grows, up to --max-replicas."),
    ] = 1.0
    shrink_delay_s: Annotated[
        float,
        NotNegative,
        Option(
            CLUSTER,
            "Seconds in which one replica fewer would have done before one is taken away, and its "
            "cache with it.",
        ),
    ] = 300.0
    routers: Annotated[int, Positive, Option(CLUSTER, "Processes that take requests.")] = 1
    host: Annotated[str, Option(CLUSTER, "Address to listen on; 0.0.0.0 is every one.")] = (
        "127.0.0.1"
    )
    port: Annotated[int, Field(ge=1, le=65535), Option(CLUSTER, "Port to listen on.")] = 8000
    redis_url: Annotated[
        str | None,
        Option(
            CLUSTER,
            "Redis 6.2 or newer that holds the index.",
            example="redis://127.0.0.1:6379",
            default="one is started",
        ),
    ] = None
    gpus_per_replica: Annotated[
        int | None,
        NotNegative,
        Option(
            CLUSTER,
            "GPUs over which one engine is spread.",
            example="1",
            default="1 where there are GPUs",
            flags=("--gpus-per-replica", "--tensor-parallel-size"),
        ),
    ] = None
    max_num_seqs: Annotated[
        int | None,
        Positive,
        Option(CLUSTER, "Requests in one batch.", example="64", default="the engine's"),
    ] = None
    stream_interval: Annotated[
        int,
        Positive,
        Option(
            CLUSTER,
            "Tokens in one chunk of a streamed answer, after its first; a router's work for long "
            "answers is by the chunk.",
        ),
    ] = 1
    max_body_mb: Annotated[int, Positive, Option(CLUSTER, "Largest request body, in MB.")] = 16
    policy: Annotated[
        Literal["kvroute", "round-robin", "power-of-two", "least-loaded", "random"],
        Option(CLUSTER, "How replicas are chosen; all but kvroute ignore what is cached."),
    ] = "kvroute"
    request_log: Annotated[
        Path | None,
        AfterValidator(given.absolute),
        Option(
            CLUSTER,
            "Folder for logs that kvroute replay reads: a file of each router and model, a line "
            "of each request, with lengths, times and block ids, no text.",
            example="requests",
            default="none is written",
        ),
    ] = None
    metrics: Annotated[
        bool,
        Option(
            CLUSTER,
            "Every process tells Prometheus its metrics, on a port of its own.",
            example="1 or 0",
            flags=("--metrics/--no-metrics",),
        ),
    ] = True
    log_format: Annotated[
        Literal["text", "json"],
        Option(CLUSTER, "Of what routers and replicas log: text, or json with a line a record."),
    ] = "text"
    ui: Annotated[
        bool,
        Option(
            CLUSTER,
            "A live page at /ui: replicas, their caches, hits and decisions.",
            example="1 or 0",
            flags=("--ui/--no-ui",),
        ),
    ] = True
    start_timeout_s: Annotated[
        float, Field(gt=0), Option(CLUSTER, "Seconds until a start counts as failed.")
    ] = 600.0
    hang_timeout_s: Annotated[
        float,
        Field(ge=2),
        Option(CLUSTER, "Seconds without a sign of life after which a replica is replaced."),
    ] = 5.0
    drain_timeout_s: Annotated[
        float,
        NotNegative,
        Option(
            CLUSTER,
            "Seconds in which a replica that is taken away may finish what it runs; what is left "
            "then goes on at another one.",
        ),
    ] = 600.0

    prefix_caching: Annotated[
        bool,
        Option(
            CACHE,
            "Keep the KV cache of prompts and use it again.",
            example="1 or 0",
            flags=("--prefix-caching/--no-prefix-caching",),
            env=("REUSE_CACHE", "NIM_ENABLE_KV_CACHE_REUSE"),
        ),
    ] = True
    block_size: Annotated[
        int | None,
        Positive,
        Option(
            CACHE,
            "Tokens in one block of the cache.",
            example="32",
            default=f"{CPU_BLOCK_SIZE} on CPUs, {GPU_BLOCK_SIZE} on GPUs",
            env=("SEQ_SIZE_PER_BLOCK",),
        ),
    ] = None
    pin_share: Annotated[
        float,
        Field(ge=0, le=1),
        Option(
            CACHE,
            "Share of the cache that named prefixes may take for good; what a longest request "
            "needs is always left.",
        ),
    ] = 0.3
    kv_cache_memory_mb: Annotated[
        int, Positive, Option(CACHE, "Memory of one replica's cache in MB, on CPUs.")
    ] = 512

    multi_task_prompt: Annotated[
        Path | None,
        AfterValidator(given.absolute),
        Option(
            PREFIXES,
            'File with prefixes to start with: [{"task_id": 1, "prompt": "..."}, ...].',
            example="tasks.json",
            default="none",
            env=("MULTI_TASK_PROMPT",),
        ),
    ] = None
    multi_task_prompt_str: Annotated[
        str | None,
        Option(
            PREFIXES,
            "The same as JSON instead of a file.",
            example='[{"task_id": 1, "prompt": "You are ..."}]',
            default="none",
            env=("MULTI_TASK_PROMPT_STR",),
        ),
    ] = None

    auto_pin: Annotated[
        bool,
        Option(PREFIXES, "Pin hot prefixes that nobody named, for as long as they are hot."),
    ] = False

    lora: Annotated[
        list[str],
        BeforeValidator(given.listed),
        AfterValidator(given.absolute_folders),
        Option(
            ADAPTERS,
            "Name of an adapter and its folder; once for each, or parted by commas.",
            example="sql=adapters/sql",
            default="none",
            flags=("--lora", "--lora-modules"),
        ),
    ] = []
    max_loras: Annotated[
        int, Positive, Option(ADAPTERS, "Different adapters in one batch of a replica.")
    ] = 4
    max_cpu_loras: Annotated[
        int,
        Positive,
        Option(ADAPTERS, "Adapters that a replica keeps in memory; never fewer than --max-loras."),
    ] = 16

    simulated_prefill_tokens_per_s: Annotated[
        float, NotNegative, Option(SIMULATED, "Prompt tokens in a second; 0: no time at all.")
    ] = 20_000.0
    simulated_decode_ms: Annotated[
        float, NotNegative, Option(SIMULATED, "Milliseconds for one token of the answer.")
    ] = 10.0
    simulated_blocks: Annotated[int, Positive, Option(SIMULATED, "Blocks in the KV cache.")] = 4096

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return init_settings, Environment(settings_cls)


PER_MODEL = tuple(  # what one of several models may have of its own
    name
    for name, field in Choices.model_fields.items()
    if option(field).group in (MODEL, CACHE, PREFIXES, ADAPTERS, SIMULATED)
    or name in ("replicas", "max_replicas", "gpus_per_replica", "max_num_seqs")
)
