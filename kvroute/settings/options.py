"""Every option is defined once, in the class of the side that needs it.

An option is a field: its name, type, default, and an Option with its group, help, flags and
environment names. The command line, the environment, the table in the documents, and the settings
of replicas and routers are derived from it. A field of ReplicaOptions reaches every replica, and so
on; a replica restarts only when one of its own options changes.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, JsonValue
from pydantic.fields import FieldInfo

from kvroute.process.builtin_model import BUILTIN_MODEL
from kvroute.settings import parsers
from kvroute.settings.help import Option, option
from kvroute.store.keys import DEFAULT_CLUSTER

CPU_BLOCK_SIZE = 32  # tokens
GPU_BLOCK_SIZE = 16  # tokens


MODEL = "Model"
REPLICAS = "Replicas"
CLUSTER = "Cluster"
CACHE = "KV cache"
PREFIXES = "Named prefixes"
ADAPTERS = "LoRA adapters"
SIMULATED = "Simulated engine (--engine simulated)"
GROUPS = (MODEL, REPLICAS, CLUSTER, CACHE, PREFIXES, ADAPTERS, SIMULATED)

Dtype = Literal["auto", "half", "float16", "bfloat16", "float", "float32"]  # vLLM's

Positive = Field(ge=1)
NotNegative = Field(ge=0)


def in_order(fields: Mapping[str, FieldInfo]) -> dict[str, FieldInfo]:
    """The options group by group."""
    return dict(sorted(fields.items(), key=lambda item: GROUPS.index(option(item[1]).group)))


class CommonOptions(BaseModel):
    """The options for every replica and every router of a model."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", protected_namespaces=(), defer_build=True
    )

    model: Annotated[
        str,
        BeforeValidator(parsers.joined),
        Option(
            MODEL,
            "Built-in model, local folder or hub name. Several: comma-separated, or one --model "
            "each.",
            kind=list[str],
        ),
    ] = BUILTIN_MODEL
    served_model_name: Annotated[
        str | None,
        Option(MODEL, "Name by which clients ask for the model.", default="same as --model"),
    ] = None
    revision: Annotated[
        str,
        Option(MODEL, "Version of the model; replicas of different versions share no prefixes."),
    ] = ""
    cluster: Annotated[
        str | None,
        Field(pattern=r"^[\w.-]{1,100}$"),
        Option(
            CLUSTER,
            "Id of the cluster. Clusters that share a Redis need different ids; one cluster keeps "
            "its id over restarts.",
            example="production",
            default=f"HOSTNAME-PORT; {DEFAULT_CLUSTER} under serve deploy",
        ),
    ] = None
    redis_url: Annotated[
        str | None,
        Option(
            CLUSTER,
            "Redis 6.2 or newer that holds the index.",
            example="redis://127.0.0.1:6379",
            default="one is started",
        ),
    ] = None
    metrics: Annotated[
        bool,
        Option(
            CLUSTER,
            "Every process serves Prometheus metrics on a port of its own.",
            example="1 or 0",
            flags=("--metrics/--no-metrics",),
        ),
    ] = True
    metrics_port_range: Annotated[
        str,
        AfterValidator(parsers.checked_ports),
        Option(
            CLUSTER,
            "Ports of which each process takes a free one for its metrics.",
            example="9400-9499",
            default="any",
        ),
    ] = ""
    metrics_token_file: Annotated[
        Path | None,
        AfterValidator(parsers.absolute),
        Option(
            CLUSTER,
            "File with the token that whoever reads the metrics of a process must send; every "
            "node needs it.",
            example="metrics-token",
            default="none is asked for",
        ),
    ] = None
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
    engine: Annotated[
        Literal["vllm", "simulated"],
        Option(MODEL, "What runs the model; simulated: modelled time and no model."),
    ] = "vllm"
    engine_args: Annotated[
        dict[str, JsonValue],
        BeforeValidator(parsers.engine_args),
        Option(
            MODEL,
            "Any other of vLLM's engine arguments: a JSON object, or name=value, several times. "
            "name=value wins over the object.",
            example="""'{"gpu_memory_utilization": 0.85}' or gpu_memory_utilization=0.85""",
            default="none",
            flags=("--engine-args", "--engine-arg"),
            kind=list[str],
        ),
    ] = {}


class ReplicaOptions(CommonOptions):
    """The options for every replica."""

    dtype: Annotated[
        Dtype,
        Option(
            MODEL,
            "Data type of weights and activations; auto: the model's own, but float32 for the "
            "built-in model on CPUs without bfloat16.",
        ),
    ] = "auto"
    replica_ports: Annotated[
        str,
        AfterValidator(parsers.checked_ports),
        Option(
            REPLICAS,
            "Ports of which each replica takes a free one, for the routers' connections.",
            example="20000-20999",
            default="any",
        ),
    ] = ""
    max_model_len: Annotated[
        int | None,
        Positive,
        Option(
            MODEL,
            "Most tokens of prompt and answer together.",
            example="4096",
            default="the model's",
        ),
    ] = None
    max_num_seqs: Annotated[
        int | None,
        Positive,
        Option(MODEL, "Most requests in one batch.", example="64", default="the engine's"),
    ] = None
    stream_interval: Annotated[
        int,
        Positive,
        Option(
            CLUSTER,
            "Tokens in one chunk of a streamed answer, after its first token. Larger chunks "
            "cost a router less.",
        ),
    ] = 1
    max_compile_s: Annotated[
        float,
        Field(gt=0, le=600),
        Option(
            MODEL,
            "CPU seconds that the JSON schema, regex or grammar of a request may take to compile; "
            "one that takes more is refused with 400.",
        ),
    ] = 10.0
    inline_system: Annotated[
        Literal["keep", "merge"],
        Option(
            MODEL,
            "System messages in the middle of a conversation of /v1/messages. keep: they stay "
            "there. merge: they move to the front, where each new one costs the cached prompt.",
        ),
    ] = "keep"
    prefix_caching: Annotated[
        bool,
        Option(
            CACHE,
            "Keep the KV cache of prompts and reuse it.",
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
            "Share of the cache that named prefixes may occupy permanently. Room for one request "
            "of the greatest length is always left.",
        ),
    ] = 0.3
    host_cache_gb: Annotated[
        str,
        AfterValidator(parsers.checked_size),
        Option(
            CACHE,
            "Host memory in GB in which each replica keeps blocks that its GPU's cache evicts; or "
            "a share of its node's memory, such as 30%. Its ranks share it.",
            example="64",
        ),
    ] = "0"
    data_parallel_size: Annotated[
        int,
        Field(ge=1, le=256),
        Option(
            REPLICAS,
            "Data parallel ranks of a replica, each with a cache of its own. They share "
            "--gpus-per-replica.",
        ),
    ] = 1
    kv_cache_memory_mb: Annotated[
        int, Positive, Option(CACHE, "Memory in MB of the cache of one replica or rank, on CPUs.")
    ] = 512
    max_loras: Annotated[
        int, Positive, Option(ADAPTERS, "Most different adapters in one batch of a replica.")
    ] = 4
    max_cpu_loras: Annotated[
        int,
        Positive,
        Option(ADAPTERS, "Adapters that a replica keeps in memory; at least --max-loras."),
    ] = 16
    simulated_prefill_tokens_per_s: Annotated[
        float, NotNegative, Option(SIMULATED, "Prompt tokens per second; 0: no delay.")
    ] = 20_000.0
    simulated_decode_ms: Annotated[
        float, NotNegative, Option(SIMULATED, "Milliseconds for one token of the answer.")
    ] = 10.0
    simulated_blocks: Annotated[int, Positive, Option(SIMULATED, "Blocks in the KV cache.")] = 4096
    simulated_host_gb_per_s: Annotated[
        float,
        Field(gt=0),
        Option(SIMULATED, "Speed of copies from host memory, of 131,072 bytes a token."),
    ] = 25.0


class RouterOptions(CommonOptions):
    """The options for every router."""

    max_body_mb: Annotated[int, Positive, Option(CLUSTER, "Largest request body in MB.")] = 16
    max_requests: Annotated[
        int, Positive, Option(CLUSTER, "Requests under way in one router; more get a 429.")
    ] = 2000
    max_wait_s: Annotated[
        float,
        Field(ge=0, le=1e6),
        Option(
            CLUSTER,
            "Seconds that a request waits for a replica to begin with it. One that would wait "
            "longer gets a 429 at once. Batch requests wait as long as they say; 0: so do all.",
        ),
    ] = 30.0
    max_sessions: Annotated[
        Literal["auto", "off"] | int,
        BeforeValidator(parsers.session_limit),
        Option(
            CLUSTER,
            "Sessions that may be active at once; the others wait for a seat. auto: while the "
            "contexts of active sessions exceed the caches, as many as fit; off: any number.",
            example="auto, off or 100",
            kind=str,
        ),
    ] = "auto"
    # Agents give up after 10 minutes, as do the official clients: nobody reads a later answer.
    max_seat_wait_s: Annotated[
        float,
        Field(ge=0, le=1e6),
        Option(
            CLUSTER,
            "Seconds that a request waits for a seat of its session. One that would wait longer "
            "gets a 429 at once. 0: there is no limit.",
        ),
    ] = 600.0
    policy: Annotated[
        Literal["kvroute", "round-robin", "power-of-two", "least-loaded", "random"],
        Option(CLUSTER, "How a replica is chosen. All but kvroute ignore what is cached."),
    ] = "kvroute"
    escape_special_tokens: Annotated[
        bool | None,
        Option(
            MODEL,
            "What clients write in messages becomes no special token, so that nobody can end a "
            "message and begin another one's. Prompts of /v1/completions stay as they are.",
            example="1 or 0",
            default="on with --api-keys",
            flags=("--escape-special-tokens/--no-escape-special-tokens",),
            kind=bool,
        ),
    ] = None
    api_keys: Annotated[
        Path | None,
        AfterValidator(parsers.absolute),
        Option(
            CLUSTER,
            "File of API keys, which kvroute keys edits: each belongs to a tenant, whose caches "
            "are its own.",
            example="keys.json",
            default="no keys are needed",
        ),
    ] = None
    allow_origin: Annotated[
        list[str],
        BeforeValidator(parsers.listed),
        AfterValidator(parsers.origins),
        Option(
            CLUSTER,
            "Origin whose web pages may use the cluster from a browser; once per origin, or "
            "comma-separated. *: every page that anybody opens who reaches the cluster; have API "
            "keys then.",
            example="https://chat.example.com",
            default="none but its own",
        ),
    ] = []
    response_store_mb: Annotated[
        int,
        NotNegative,
        Option(
            CLUSTER,
            "MB of Redis for the stored responses of each model, which previous_response_id "
            "needs; 0: none is stored.",
            example="256",
        ),
    ] = 0
    response_ttl_s: Annotated[
        float,
        Field(gt=0, le=1e9),
        Option(CLUSTER, "Seconds for which a response stays stored after its last use."),
    ] = 86_400.0
    request_log: Annotated[
        Path | None,
        AfterValidator(parsers.absolute),
        Option(
            CLUSTER,
            "Folder for request logs, which kvroute replay reads: one file per router and model, "
            "one line per request with lengths, times and block ids, without text.",
            example="requests",
            default="none is written",
        ),
    ] = None
    ui: Annotated[
        bool,
        Option(
            CLUSTER,
            "A live page at /ui: replicas, their caches, hits and decisions.",
            example="1 or 0",
            flags=("--ui/--no-ui",),
        ),
    ] = True
    hang_timeout_s: Annotated[
        float,
        Field(ge=2),
        Option(CLUSTER, "Seconds without a sign of life after which a replica is replaced."),
    ] = 5.0


class DeploymentOptions(BaseModel):
    """The options for Serve, which starts the replicas; replicas do not receive them."""

    replicas: Annotated[int, Positive, Option(REPLICAS, "Engines, each with its own cache.")] = 2
    max_replicas: Annotated[
        int | None,
        Positive,
        Option(
            REPLICAS,
            "Most replicas. The fleet then scales with its load, and --replicas is the fewest.",
            example="8",
            default="as many as --replicas",
        ),
    ] = None
    gpus_per_replica: Annotated[
        int | None,
        NotNegative,
        Option(
            REPLICAS,
            "GPUs of one replica. Each data parallel rank has its share, for tensor parallelism.",
            example="1",
            default="1 for each rank where there are GPUs",
            flags=("--gpus-per-replica", "--tensor-parallel-size"),
        ),
    ] = None
    target_wait_s: Annotated[
        float,
        Field(gt=0),
        Option(CLUSTER, "Seconds in a queue above which replicas are added, up to --max-replicas."),
    ] = 1.0
    shrink_delay_s: Annotated[
        float,
        NotNegative,
        Option(
            REPLICAS,
            "Seconds for which one replica fewer must have been enough before one is removed, "
            "and its cache with it.",
        ),
    ] = 300.0


class ModelOptions(ReplicaOptions, RouterOptions, DeploymentOptions):
    """All options of one model."""

    multi_task_prompt: Annotated[
        Path | None,
        AfterValidator(parsers.absolute),
        Option(
            PREFIXES,
            'File of prefixes to start with: [{"task_id": 1, "prompt": "..."}, ...].',
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
    lora: Annotated[
        list[str],
        BeforeValidator(parsers.listed),
        AfterValidator(parsers.absolute_folders),
        Option(
            ADAPTERS,
            "An adapter's name and folder; once per adapter, or comma-separated.",
            example="sql=adapters/sql",
            default="none",
            flags=("--lora", "--lora-modules"),
        ),
    ] = []


class Options(ModelOptions):
    """All options; those of this class apply to the whole cluster."""

    models: Annotated[
        list[dict[str, Any]],
        BeforeValidator(parsers.from_json),
        Option(
            CLUSTER,
            "Several models as JSON, each with options of its own.",
            example='[{"model": "Qwen/Qwen3-8B", "replicas": 4}, {"model": "Qwen/Qwen3-0.6B"}]',
            default="none",
            kind=str,
        ),
    ] = []
    routers: Annotated[int, Positive, Option(CLUSTER, "Processes that take requests.")] = 1
    host: Annotated[
        str, Option(CLUSTER, "Address to listen on; 0.0.0.0: all of this machine's.")
    ] = "127.0.0.1"
    insecure: Annotated[
        bool,
        Option(
            CLUSTER,
            "Listen on other addresses than this machine's own without API keys, and answer to any "
            "name: everybody who reaches them can use, watch and change the cluster.",
            example="1 or 0",
            flags=("--insecure",),
        ),
    ] = False
    port: Annotated[int, Field(ge=1, le=65535), Option(CLUSTER, "Port to listen on.")] = 8000
    tls_cert: Annotated[
        Path | None,
        AfterValidator(parsers.absolute),
        Option(
            CLUSTER,
            "PEM file of a certificate and its chain: the endpoint is https. Under serve deploy, "
            "set KVROUTE_TLS_CERT and KVROUTE_TLS_KEY on the head.",
            example="cert.pem",
            default="http",
        ),
    ] = None
    tls_key: Annotated[
        Path | None,
        AfterValidator(parsers.absolute),
        Option(CLUSTER, "PEM file of its key.", example="key.pem", default="none"),
    ] = None
    drain_timeout_s: Annotated[
        float,
        NotNegative,
        Option(
            CLUSTER,
            "Seconds in which a removed replica may finish its requests. The rest then continues "
            "at other replicas.",
        ),
    ] = 600.0
    idle_timeout_s: Annotated[
        float,
        Field(ge=1, le=86_400),
        Option(
            CLUSTER,
            "Seconds after which a client's connection without a request is closed. A load "
            "balancer should close its own sooner. Under serve deploy, set KVROUTE_IDLE_TIMEOUT_S "
            "on every node.",
        ),
    ] = 90.0
    drain_s: Annotated[
        float,
        NotNegative,
        Option(
            CLUSTER,
            "Seconds in which running answers may finish after the Ctrl-C or SIGTERM that stops "
            "kvroute serve. The rest then ends with an error.",
        ),
    ] = 30.0
    log_format: Annotated[
        Literal["text", "json"],
        Option(CLUSTER, "Format of the logs of routers and replicas; json: one object per line."),
    ] = "text"
    start_timeout_s: Annotated[
        float, Field(gt=0), Option(CLUSTER, "Seconds after which a start has failed.")
    ] = 600.0


PER_MODEL = tuple(  # options that each of several models can set
    name
    for name, field in in_order(ModelOptions.model_fields).items()
    if option(field).group != CLUSTER
)
