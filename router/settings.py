"""What follows from a user's choices: for each model, for its replicas and for the routers."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from replica.adapters import Adapter, read_adapter
from replica.model import BUILTIN_MODEL
from replica.settings import ReplicaSettings
from router.command.choices import CPU_BLOCK_SIZE, GPU_BLOCK_SIZE, PER_MODEL, Choices
from router.command.options import SettingsError, explain
from router.named.multi_task import Task, read_tasks


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


class ServeSettings(Choices):
    """A user's choices, and what others are told of them."""

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
        _refuse_same_names(each)
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

    def router(self) -> RouterSettings:
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


def _refuse_same_names(each: Sequence[ServeSettings]) -> None:
    numbers: dict[str, int] = {}
    for number, settings in enumerate(each):
        for name in (settings.name, *(adapter.name for adapter in settings.adapters())):
            if (first := numbers.setdefault(name, number)) != number:
                raise SettingsError(
                    f"models[{first}] and models[{number}] are both served as {name!r}; "
                    "give each a served_model_name of its own, or its adapter another name"
                )


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
