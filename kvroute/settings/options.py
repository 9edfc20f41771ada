"""All options of users, each defined once.

An option is a field: its name, type, default, and an Option with its group, help, flags and
environment names. The command line, the environment, the table in the documents, and the settings
of replicas and routers are derived from it. The class of an option decides which processes receive
it, for example ReplicaOptions for replicas. Replicas only restart if one of their options changes.
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

CPU_BLOCK_SIZE = 32  # default tokens per block on CPUs
GPU_BLOCK_SIZE = 16  # default tokens per block on GPUs


MODEL = "Model"
REPLICAS = "Replicas"
ENDPOINT = "Endpoint"
QUEUE = "Routing and the queue"
CLUSTER = "Cluster"
LOGS = "Logs, metrics and the live page"
CACHE = "KV cache"
PREFIXES = "Named prefixes"
ADAPTERS = "LoRA adapters"
SIMULATED = "Simulated engine (--engine simulated)"
GROUPS = (  # in the order of --help and of the documents
    *(MODEL, REPLICAS, ENDPOINT, CACHE, QUEUE, PREFIXES, ADAPTERS),
    *(CLUSTER, LOGS, SIMULATED),
)
FIRST = ("host", "port", "api_keys", "policy")  # the first options of their groups
WHOLE_CLUSTER = (ENDPOINT, QUEUE, CLUSTER, LOGS)  # groups whose options are the same for all models

Dtype = Literal["auto", "half", "float16", "bfloat16", "float", "float32"]  # vLLM's names

Positive = Field(ge=1)
NotNegative = Field(ge=0)


def in_order(fields: Mapping[str, FieldInfo]) -> dict[str, FieldInfo]:
    """Return the options by group, those that most users need first."""
    return dict(sorted(fields.items(), key=lambda item: _rank(*item)))


def _rank(name: str, field: FieldInfo) -> tuple[int, int]:
    first = FIRST.index(name) if name in FIRST else len(FIRST)
    return GROUPS.index(option(field).group), first


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
            "Built-in model, local folder or hub name. For several models, separate them with "
            "commas or repeat --model.",
            kind=list[str],
        ),
    ] = BUILTIN_MODEL
    served_model_name: Annotated[
        str | None,
        Option(MODEL, "Model name that clients send.", default="same as --model"),
    ] = None
    revision: Annotated[
        str,
        Option(MODEL, "Revision of the model. Replicas of different revisions share no prefixes."),
    ] = ""
    cluster: Annotated[
        str | None,
        Field(pattern=r"^[\w.-]{1,100}$"),
        Option(
            CLUSTER,
            "Id of the cluster. Clusters that share a Redis need different ids. Keep the id when "
            "you restart a cluster.",
            example="production",
            default=f"HOSTNAME-PORT; {DEFAULT_CLUSTER} under serve deploy",
        ),
    ] = None
    redis_url: Annotated[
        str | None,
        Option(
            CLUSTER,
            "URL of the Redis for the index, version 6.2 or newer.",
            example="redis://127.0.0.1:6379",
            default="kvroute starts a Redis",
        ),
    ] = None
    metrics: Annotated[
        bool,
        Option(
            LOGS,
            "Serve Prometheus metrics, each process on its own port.",
            example="1 or 0",
            flags=("--metrics/--no-metrics",),
        ),
    ] = True
    metrics_port_range: Annotated[
        str,
        AfterValidator(parsers.checked_ports),
        Option(
            LOGS,
            "Range of ports; each process serves its metrics on a free one.",
            example="9400-9499",
            default="any",
        ),
    ] = ""
    metrics_token_file: Annotated[
        Path | None,
        AfterValidator(parsers.absolute),
        Option(
            LOGS,
            "File with a token that clients must send to read a process's metrics. Every node "
            "needs the file.",
            example="metrics-token",
            default="no token is needed",
        ),
    ] = None
    block_size: Annotated[
        int | None,
        Positive,
        Option(
            CACHE,
            "Tokens in one block of the KV cache.",
            example="32",
            default=f"{CPU_BLOCK_SIZE} on CPUs, {GPU_BLOCK_SIZE} on GPUs",
            env=("SEQ_SIZE_PER_BLOCK",),
        ),
    ] = None
    engine: Annotated[
        Literal["vllm", "simulated"],
        Option(MODEL, "Engine that runs the model. simulated: modelled timing, without a model."),
    ] = "vllm"
    engine_args: Annotated[
        dict[str, JsonValue],
        BeforeValidator(parsers.engine_args),
        Option(
            MODEL,
            "Other engine arguments of vLLM, as a JSON object or as name=value; may be repeated. "
            "name=value has priority over the object.",
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
            "Maximum share of the KV cache for pinned prefixes. Enough blocks for one request of "
            "maximum length always stay free of pins.",
        ),
    ] = 0.3
    host_cache_gb: Annotated[
        str,
        AfterValidator(parsers.checked_size),
        Option(
            CACHE,
            "Host memory of each replica for blocks that its GPU cache evicts: a number of GB, or "
            "a percentage of the node's memory, such as 30%. The ranks of the replica share it.",
            example="64",
        ),
    ] = "0"
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
        int, Positive, Option(CACHE, "KV cache of one replica or rank in MB, on CPUs.")
    ] = 512
    max_loras: Annotated[
        int, Positive, Option(ADAPTERS, "Maximum different adapters in one batch of a replica.")
    ] = 4
    max_cpu_loras: Annotated[
        int,
        Positive,
        Option(ADAPTERS, "Maximum adapters in a replica's memory, at least --max-loras."),
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
        Option(SIMULATED, "Speed of copies from host memory in GB/s; a token has 131,072 bytes."),
    ] = 25.0


class RouterOptions(CommonOptions):
    """The options for every router."""

    max_body_mb: Annotated[int, Positive, Option(ENDPOINT, "Maximum request body in MB.")] = 16
    max_requests: Annotated[
        int,
        Positive,
        Option(QUEUE, "Maximum requests in one router at a time; further ones get a 429."),
    ] = 2000
    max_wait_s: Annotated[
        float,
        Field(ge=0, le=1e6),
        Option(
            QUEUE,
            "Maximum seconds that a request waits in the router's queue. A request that would wait "
            "longer gets a 429 at once. Batch requests have no limit unless they set one. 0 "
            "removes the limit for all requests.",
        ),
    ] = 30.0
    max_sessions: Annotated[
        Literal["auto", "off"] | int,
        BeforeValidator(parsers.session_limit),
        Option(
            QUEUE,
            "Maximum active sessions; other sessions wait for a seat. auto: when the contexts of "
            "active sessions exceed the caches, as many as fit. off: no limit.",
            example="auto, off or 100",
            kind=str,
        ),
    ] = "auto"
    # The default is 10 minutes: after that time agents and the official clients give up.
    max_seat_wait_s: Annotated[
        float,
        Field(ge=0, le=1e6),
        Option(
            QUEUE,
            "Maximum seconds that a request waits for a seat of its session. A request that would "
            "wait longer gets a 429 at once. 0: no limit.",
        ),
    ] = 600.0
    policy: Annotated[
        Literal["kvroute", "round-robin", "power-of-two", "least-loaded", "random"],
        Option(QUEUE, "Policy that chooses a replica. Only kvroute uses cached prefixes."),
    ] = "kvroute"
    escape_special_tokens: Annotated[
        bool | None,
        Option(
            MODEL,
            "Treat special tokens in clients' messages as plain text, so that a client cannot end "
            "a message and forge another role's. Prompts of /v1/completions are not changed.",
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
            ENDPOINT,
            "File of API keys; edit it with kvroute keys. Each key belongs to a tenant. Tenants "
            "do not share caches.",
            example="keys.json",
            default="no keys are needed",
        ),
    ] = None
    allow_origin: Annotated[
        list[str],
        BeforeValidator(parsers.listed),
        AfterValidator(parsers.origins),
        Option(
            ENDPOINT,
            "Origin whose web pages may use the cluster from a browser. For several, repeat the "
            "option or separate them with commas. *: all web pages; use API keys in this case.",
            example="https://chat.example.com",
            default="only its own pages",
        ),
    ] = []
    response_store_mb: Annotated[
        int,
        NotNegative,
        Option(
            ENDPOINT,
            "Redis memory in MB for the stored responses of each model, which previous_response_id "
            "needs. 0: responses are not stored.",
            example="256",
        ),
    ] = 0
    response_ttl_s: Annotated[
        float,
        Field(gt=0, le=1e9),
        Option(ENDPOINT, "Seconds after its last use until a stored response expires."),
    ] = 86_400.0
    request_log: Annotated[
        Path | None,
        AfterValidator(parsers.absolute),
        Option(
            LOGS,
            "Folder for request logs, which kvroute replay reads. Each router writes one file per "
            "model, with one line per request: lengths, times and block ids, without text.",
            example="requests",
            default="no log is written",
        ),
    ] = None
    ui: Annotated[
        bool,
        Option(
            LOGS,
            "Serve a live page at /ui with replicas, their caches, cache hits and routing "
            "decisions.",
            example="1 or 0",
            flags=("--ui/--no-ui",),
        ),
    ] = True
    hang_timeout_s: Annotated[
        float,
        Field(ge=2),
        Option(QUEUE, "Seconds without a response after which a replica is replaced."),
    ] = 5.0


class DeploymentOptions(BaseModel):
    """The options for Serve, which starts the replicas; replicas do not receive them."""

    replicas: Annotated[
        int, Positive, Option(REPLICAS, "Number of replicas, each with its own KV cache.")
    ] = 2
    max_replicas: Annotated[
        int | None,
        Positive,
        Option(
            REPLICAS,
            "Maximum replicas. The fleet then scales with its load, and --replicas is the minimum.",
            example="8",
            default="same as --replicas",
        ),
    ] = None
    gpus_per_replica: Annotated[
        int | None,
        NotNegative,
        Option(
            REPLICAS,
            "GPUs of one replica, divided equally among its data parallel ranks for tensor "
            "parallelism.",
            example="1",
            default="1 for each rank if the machine has GPUs",
            flags=("--gpus-per-replica", "--tensor-parallel-size"),
        ),
    ] = None
    target_wait_s: Annotated[
        float,
        Field(gt=0),
        Option(CLUSTER, "Queue wait in seconds above which replicas are added (--max-replicas)."),
    ] = 1.0
    shrink_delay_s: Annotated[
        float,
        NotNegative,
        Option(
            REPLICAS,
            "Seconds for which the load must fit on one replica less before a replica and its "
            "cache are removed.",
        ),
    ] = 300.0


class ModelOptions(ReplicaOptions, RouterOptions, DeploymentOptions):
    """All options of one model."""

    multi_task_prompt: Annotated[
        Path | None,
        AfterValidator(parsers.absolute),
        Option(
            PREFIXES,
            'File of named prefixes to declare at the start: [{"task_id": 1, "prompt": "..."}, '
            "...].",
            example="tasks.json",
            default="none",
            env=("MULTI_TASK_PROMPT",),
        ),
    ] = None
    multi_task_prompt_str: Annotated[
        str | None,
        Option(
            PREFIXES,
            "Named prefixes to declare at the start, as JSON.",
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
            "Name and folder of an adapter. For several, repeat the option or separate them with "
            "commas.",
            example="sql=adapters/sql",
            default="none",
            flags=("--lora", "--lora-modules"),
        ),
    ] = []


class Options(ModelOptions):
    """All options; the options of this class apply to the whole cluster."""

    models: Annotated[
        list[dict[str, Any]],
        BeforeValidator(parsers.from_json),
        Option(
            MODEL,
            "Several models as JSON, each with its own options.",
            example='[{"model": "Qwen/Qwen3-8B", "replicas": 4}, {"model": "Qwen/Qwen3-0.6B"}]',
            default="none",
            kind=str,
        ),
    ] = []
    routers: Annotated[int, Positive, Option(CLUSTER, "Number of router processes.")] = 1
    host: Annotated[
        str, Option(ENDPOINT, "Address to listen on. 0.0.0.0: all addresses of this machine.")
    ] = "127.0.0.1"
    insecure: Annotated[
        bool,
        Option(
            ENDPOINT,
            "Allow a --host that other machines can reach without API keys, and any Host header. "
            "Everybody who reaches the address can then use, watch and change the cluster.",
            example="1 or 0",
            flags=("--insecure",),
        ),
    ] = False
    port: Annotated[int, Field(ge=1, le=65535), Option(ENDPOINT, "Port to listen on.")] = 8000
    tls_cert: Annotated[
        Path | None,
        AfterValidator(parsers.absolute),
        Option(
            ENDPOINT,
            "PEM file of a certificate and its chain, for https. Under serve deploy, set "
            "KVROUTE_TLS_CERT and KVROUTE_TLS_KEY on the head node.",
            example="cert.pem",
            default="http",
        ),
    ] = None
    tls_key: Annotated[
        Path | None,
        AfterValidator(parsers.absolute),
        Option(ENDPOINT, "PEM file of the certificate's key.", example="key.pem", default="none"),
    ] = None
    drain_timeout_s: Annotated[
        float,
        NotNegative,
        Option(
            CLUSTER,
            "Seconds that a removed replica has to finish its requests. Requests that are not "
            "finished then continue on other replicas.",
        ),
    ] = 600.0
    idle_timeout_s: Annotated[
        float,
        Field(ge=1, le=86_400),
        Option(
            ENDPOINT,
            "Seconds after which an idle connection of a client is closed. A load balancer in "
            "front needs a shorter timeout. Under serve deploy, set KVROUTE_IDLE_TIMEOUT_S on "
            "every node.",
        ),
    ] = 90.0
    drain_s: Annotated[
        float,
        NotNegative,
        Option(
            CLUSTER,
            "Seconds that running requests have to finish after Ctrl-C or SIGTERM stops kvroute "
            "serve. Requests that are not finished then end with an error.",
        ),
    ] = 30.0
    log_format: Annotated[
        Literal["text", "json"],
        Option(LOGS, "Format of routers' and replicas' logs. json: one object per line."),
    ] = "text"
    log_dir: Annotated[
        Path | None,
        AfterValidator(parsers.absolute),
        Option(
            LOGS,
            "Folder that keeps the logs of the last run after kvroute serve has stopped.",
            example="logs",
            default="~/.local/state/kvroute",
        ),
    ] = None
    start_timeout_s: Annotated[
        float, Field(gt=0), Option(CLUSTER, "Timeout in seconds for the start of the cluster.")
    ] = 600.0


PER_MODEL = tuple(  # names of the options that can differ between several models
    name
    for name, field in in_order(ModelOptions.model_fields).items()
    if option(field).group not in WHOLE_CLUSTER
)
