"""Every choice a user has, defined once: the command line and the environment follow from here."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
)
from pydantic_core import PydanticCustomError
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from replica.adapters import Adapter, read_adapter
from replica.model import BUILTIN_MODEL
from replica.settings import ReplicaSettings
from router.multi_task import Task, read_tasks
from router.options import Environment, Option, SettingsError, explain, option

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


def _absolute(path: Path | None) -> Path | None:
    """Routers run in folders of their own."""
    return path and path.absolute()


def _listed(given: object) -> object:
    """The environment has one string for all."""
    return given.split(",") if isinstance(given, str) else given


def _absolute_folders(adapters: list[str]) -> list[str]:
    pairs = (each.partition("=") for each in adapters)
    return [f"{name}={Path(path).absolute()}" if path else name for name, _, path in pairs]


def _joined(names: object) -> object:
    """`--model` may be given several times."""
    return ",".join(names) if isinstance(names, list) else names


def _from_json(given: object) -> object:
    """A list from the command line or the environment."""
    if not isinstance(given, str):
        return given
    try:
        return json.loads(given)
    except ValueError as error:
        raise PydanticCustomError("json", "expected JSON ({why})", {"why": str(error)}) from None


class ServeSettings(BaseSettings):
    """What `kvroute serve` serves, and how. Command line, else environment, else default."""

    model_config = SettingsConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    model: Annotated[
        str,
        BeforeValidator(_joined),
        Option(
            MODEL,
            "Built-in model, local folder or hub name; several with commas in between, or one "
            "--model each.",
            kind=list[str],
        ),
    ] = BUILTIN_MODEL
    models: Annotated[
        list[dict[str, Any]],
        BeforeValidator(_from_json),
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
        AfterValidator(_absolute),
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
        AfterValidator(_absolute),
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
        BeforeValidator(_listed),
        AfterValidator(_absolute_folders),
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

    @property
    def name(self) -> str:
        """What clients call the model."""
        return self.served_model_name or self.model

    def each(self) -> "list[ServeSettings]":
        """The settings of each model alone. Raises SettingsError for one that cannot be served."""
        each = [self._own(f"models[{number}]", own) for number, own in enumerate(self._entries())]
        if self.lora and len(each) > 1:
            raise SettingsError(
                f"--lora is {','.join(self.lora)!r}, and there are several models; say it of one "
                'in --models, as "lora": ["NAME=PATH"]'
            )
        numbers: dict[str, int] = {}
        for number, settings in enumerate(each):
            for name in (settings.name, *(adapter.name for adapter in settings.adapters())):
                if (first := numbers.setdefault(name, number)) != number:
                    raise SettingsError(
                        f"models[{first}] and models[{number}] are both served as {name!r}; "
                        "give each a served_model_name of its own, or its adapter another name"
                    )
        return each

    def decided(self, each: Sequence[Mapping[str, Any]]) -> "ServeSettings":
        """The same with something more about each model, its `model` at least."""
        models = [{**own, **more} for own, more in zip(self._entries(), each, strict=True)]
        return self.model_copy(update={"model": BUILTIN_MODEL, "models": models})

    def _entries(self) -> list[dict[str, Any]]:
        """What each model has of its own."""
        names = [name.strip() for name in self.model.split(",")]
        if self.models and len(names) > 1:
            raise SettingsError(
                f"--model is {self.model!r}, and --models is given too; keep one of them"
            )
        return self.models or [{"model": name} for name in names]

    def _own(self, entry: str, own: Mapping[str, Any]) -> "ServeSettings":
        if strange := sorted(own.keys() - PER_MODEL):
            known = ", ".join(PER_MODEL)
            raise SettingsError(
                f"{entry}: {strange[0]} is no setting of a model; there are {known}"
            )
        try:
            settings = ServeSettings.model_validate({**self.model_dump(exclude={"models"}), **own})
        except ValidationError as error:
            lines = [explain(each, ServeSettings.model_fields, own) for each in error.errors()]
            raise SettingsError("\n".join(f"{entry}: {line}" for line in lines)) from None
        settings.tasks()
        settings.check_size()
        settings.adapters()
        return settings

    def replica(self, *, beside: int = 0) -> ReplicaSettings:
        """The part that a replica is told. Raises SettingsError without a redis_url.

        beside: how many replicas of other models there are.
        """
        return ReplicaSettings(
            **self.model_dump(include=set(ReplicaSettings.model_fields)) | self._decided(),
            tensor_parallel_size=max(1, self.gpus_per_replica or 0),
            cores=max(1, (os.cpu_count() or 1) // (self.replicas + beside)),
            declared=tuple(task.task_id for task in self.tasks()),
            adapters=self.adapters(),
        )

    def router(self) -> "RouterSettings":
        """The part that a router is told. Raises SettingsError without a redis_url."""
        return RouterSettings(
            **self.model_dump(include=set(RouterSettings.model_fields)) | self._decided(),
            tasks=self.tasks(),
            adapters=self.adapters(),
        )

    @property
    def most_replicas(self) -> int:
        """As many as the fleet may ever have."""
        return self.max_replicas or self.replicas

    def check_size(self) -> None:
        """Raises SettingsError when the most replicas are fewer than the least."""
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            raise SettingsError(
                f"--max-replicas is {self.max_replicas} and --replicas, the least, is "
                f"{self.replicas}; expected at least as many, such as {2 * self.replicas}"
            )

    def tasks(self) -> tuple[Task, ...]:
        """The prefixes to start with. Raises SettingsError when they cannot be read."""
        file, text = self.multi_task_prompt, self.multi_task_prompt_str
        if file and text:
            raise SettingsError(
                f"--multi-task-prompt is {str(file)!r} and --multi-task-prompt-str is given too "
                "(MULTI_TASK_PROMPT, MULTI_TASK_PROMPT_STR); keep one of them"
            )
        try:
            return read_tasks(file.read_bytes() if file else text or "[]")
        except OSError as error:
            why = f"it cannot be read ({error.strerror}); name a file that can"
        except ValueError as error:
            why = str(error)
        given = f"--multi-task-prompt is {str(file)!r}" if file else "--multi-task-prompt-str"
        raise SettingsError(f"{given}: {why}")

    def adapters(self) -> tuple[Adapter, ...]:
        """The LoRA adapters. Raises SettingsError when one cannot be used."""
        adapters: dict[str, Adapter] = {}
        for given in self.lora:
            try:
                adapter = read_adapter(given)
            except ValueError as error:
                raise SettingsError(f"--lora is {given!r}: {error}") from None
            if adapter.name in (*adapters, self.name):
                raise SettingsError(
                    f"--lora is {given!r}, and the name {adapter.name!r} is taken; give it another"
                )
            adapters[adapter.name] = adapter
        return tuple(adapters.values())

    def _decided(self) -> dict[str, Any]:
        if self.redis_url is None:
            raise SettingsError("redis_url is missing; give one, such as redis://127.0.0.1:6379")
        return {
            "served_model_name": self.name,
            "block_size": self.block_size
            or (GPU_BLOCK_SIZE if self.gpus_per_replica else CPU_BLOCK_SIZE),
        }


PER_MODEL = tuple(  # what one of several models may have of its own
    name
    for name, field in ServeSettings.model_fields.items()
    if option(field).group in (MODEL, CACHE, PREFIXES, ADAPTERS, SIMULATED)
    or name in ("replicas", "max_replicas", "gpus_per_replica", "max_num_seqs")
)


class RouterSettings(BaseModel):
    """What one router is told of one model at its start."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    model: str  # as an engine loads it
    served_model_name: str
    revision: str = ""
    redis_url: str
    block_size: int = CPU_BLOCK_SIZE  # tokens
    max_body_mb: int = 16
    policy: str = "kvroute"  # one of baselines.RANKINGS
    request_log: Path | None = None  # a folder
    metrics: bool = True
    ui: bool = True
    hang_timeout_s: float = 5.0
    tasks: tuple[Task, ...] = ()  # prefixes to start with
    auto_pin: bool = False
    adapters: tuple[Adapter, ...] = ()  # LoRA


def load(given: Mapping[str, Any]) -> ServeSettings:
    """The settings under the given command line, which wins over the environment.

    Raises SettingsError with one line for each value that cannot be used.
    """
    try:
        settings = ServeSettings(**given)
        settings.each()
        return settings
    except ValidationError as error:
        lines = [explain(each, ServeSettings.model_fields, given) for each in error.errors()]
        raise SettingsError("\n".join(lines)) from None
