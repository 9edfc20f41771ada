"""The options that both replicas and routers receive, and the groups of all options."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, JsonValue
from pydantic.fields import FieldInfo

from kvroute.features import GROUPS as FEATURE_GROUPS
from kvroute.process.builtin_model import BUILTIN_MODEL
from kvroute.settings import parsers
from kvroute.settings.help import Option, option
from kvroute.store.keys import DEFAULT_CLUSTER

CPU_BLOCK_SIZE = 32  # default number of tokens per KV block on CPUs
GPU_BLOCK_SIZE = 16  # default number of tokens per KV block on GPUs

# The groups of options, which are headings in --help-all. Each option belongs to one group.
MODEL = "Model"
REPLICAS = "Replicas"
ENDPOINT = "Endpoint"
QUEUE = "Routing and the queue"
CLUSTER = "Cluster"
LOGS = "Logs and monitoring"
CACHE = "KV cache"
ADAPTERS = "LoRA adapters"
ATTACHED = "Your own vLLM servers (--attach)"
SIMULATED = "Simulated engine (--engine simulated)"
GROUPS = (  # all groups in the order of --help-all and of the documents
    *(MODEL, REPLICAS, ENDPOINT, CACHE, QUEUE, *FEATURE_GROUPS, ADAPTERS),
    *(ATTACHED, CLUSTER, LOGS, SIMULATED),
)
# The commands that can have an option in their short --help, see Option.basic.
SERVE, ATTACH = ("serve",), ("attach",)
SERVE_AND_ATTACH = (*SERVE, *ATTACH)
WHOLE_CLUSTER = (ENDPOINT, QUEUE, CLUSTER, LOGS)  # groups whose options apply to all models alike

Positive = Field(ge=1)
NotNegative = Field(ge=0)


def in_order(fields: Mapping[str, FieldInfo]) -> dict[str, FieldInfo]:
    """Sort the options by group; in a group, basic options come first."""
    return dict(sorted(fields.items(), key=lambda item: _rank(item[1])))


def _rank(field: FieldInfo) -> tuple[int, bool]:
    described = option(field)
    return GROUPS.index(described.group), not described.basic


class CommonOptions(BaseModel):
    """The options that both the replicas and the routers of a model receive."""

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
            basic=SERVE_AND_ATTACH,
        ),
    ] = BUILTIN_MODEL
    served_model_name: Annotated[
        str | None,
        Option(
            MODEL,
            "Model name that clients send.",
            default="same as --model",
            basic=SERVE_AND_ATTACH,
        ),
    ] = None
    revision: Annotated[
        str,
        Option(MODEL, "Revision of the model. Replicas of different revisions share no prefixes."),
    ] = ""
    cluster: Annotated[
        str | None,
        AfterValidator(parsers.cluster_name),
        Option(
            CLUSTER,
            "Id of the cluster. Clusters that share a Redis need different ids, except during an "
            "upgrade of one to the other. Keep the id when you restart a cluster.",
            example="production",
            default=f"HOSTNAME-PORT; {DEFAULT_CLUSTER} under serve deploy",
        ),
    ] = None
    redis_url: Annotated[
        str | None,
        Option(
            CLUSTER,
            "URL of the Redis for the index of cached blocks, version 6.2 or newer.",
            example="redis://127.0.0.1:6379",
            default="kvroute starts a Redis",
        ),
    ] = None
    wire_tls: Annotated[
        bool,
        Option(
            CLUSTER,
            "Encrypt the connections between routers and replicas, and those over which replicas "
            "copy blocks, with TLS 1.3. Both ends show a certificate; without --wire-tls-cert they "
            "make their own.",
            example="1 or 0",
            flags=("--wire-tls",),
        ),
    ] = False
    wire_tls_cert: Annotated[
        Path | None,
        AfterValidator(parsers.absolute),
        Option(
            CLUSTER,
            "PEM file of the node's certificate and its chain, for --wire-tls. Every node needs "
            "its own one, at the same path.",
            example="wire-cert.pem",
            default="routers and replicas make certificates",
        ),
    ] = None
    wire_tls_key: Annotated[
        Path | None,
        AfterValidator(parsers.absolute),
        Option(
            CLUSTER,
            "PEM file of the key of --wire-tls-cert.",
            example="wire-key.pem",
            default="none",
        ),
    ] = None
    wire_tls_ca: Annotated[
        Path | None,
        AfterValidator(parsers.absolute),
        Option(
            CLUSTER,
            "PEM file of the authorities whose certificates are accepted with --wire-tls.",
            example="wire-ca.pem",
            default="none",
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
    lora_root: Annotated[
        Path | None,
        AfterValidator(parsers.absolute),
        Option(
            ADAPTERS,
            "Folder of the adapters that can be added while the cluster runs (kvroute adapters). "
            "Every machine needs it, at the same path.",
            example="adapters",
            default="none: no adapters can be added",
        ),
    ] = None
    engine: Annotated[
        Literal["vllm", "simulated"],
        Option(
            MODEL,
            "Engine that runs the model. simulated: no model runs, and its times are simulated.",
            basic=SERVE,
        ),
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
            basic=SERVE,
        ),
    ] = {}
