"""A cluster's settings come from the command line, else the environment, else defaults."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from pydantic import ValidationError
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from kvroute.settings.checked_options import CheckedOptions
from kvroute.settings.help import Environment, SettingsError, explain
from kvroute.settings.model_settings import Found, ModelSettings, decide
from kvroute.settings.options import PER_MODEL, ModelOptions, Options, in_order
from kvroute.store.keys import DEFAULT_CLUSTER


class ServeSettings(CheckedOptions, Options, BaseSettings):
    """All settings of `kvroute serve`; with one model they are also its options."""

    model_config = SettingsConfigDict(frozen=True, extra="forbid", protected_namespaces=())

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

    @cached_property
    def each(self) -> tuple[CheckedOptions, ...]:
        """The options of each model. Raises SettingsError when one cannot be served."""
        names = [name.strip() for name in self.model.split(",")]
        if self.models and len(names) > 1:
            raise SettingsError(
                f"--model is {self.model!r}, and --models is given too; keep one of them"
            )
        own = self.models or [{"model": name} for name in names]
        if self.lora and len(own) > 1:
            raise SettingsError(
                f"--lora is {','.join(self.lora)!r}, and there are several models; say it of one "
                'in --models, as "lora": ["NAME=PATH"]'
            )
        if not self.models and names == [self.model]:
            self.check()
            return (self,)
        each = tuple(self._own(f"models[{number}]", one) for number, one in enumerate(own))
        _refuse_same_names(each)
        return each

    def decided(
        self,
        found: Sequence[Found] | None = None,
        *,
        redis_url: str | None = None,
        cluster: str = DEFAULT_CLUSTER,
        local_only: bool = False,
    ) -> tuple[ModelSettings, ...]:
        """The settings of each model, completed with the facts of the machine.

        redis_url and cluster are defaults. local_only: see RouterSettings. Raises SettingsError
        without any redis_url.
        """
        redis_url = self.redis_url or redis_url
        if redis_url is None:
            raise SettingsError("redis_url is missing; give one, such as redis://127.0.0.1:6379")
        found = found or [Found(one.model, one.gpus_per_replica or 0) for one in self.each]
        replicas = sum(one.replicas for one in self.each)
        return tuple(
            decide(
                one,
                about,
                redis_url=redis_url,
                cluster=self.cluster or cluster,
                local_only=local_only,
                drain_timeout_s=self.drain_timeout_s,
                other_replicas=replicas - one.replicas,
            )
            for one, about in zip(self.each, found, strict=True)
        )

    def _own(self, entry: str, own: Mapping[str, Any]) -> CheckedOptions:
        """The options of one of several models. Its engine arguments add to the common ones."""
        if strange := sorted(own.keys() - PER_MODEL):
            known = ", ".join(PER_MODEL)
            raise SettingsError(
                f"{entry}: {strange[0]} is no setting of a model; there are {known}"
            )
        common = {name: getattr(self, name) for name in ModelOptions.model_fields}
        merged = {**common, **own}
        if "engine_args" in own:
            merged["engine_args"] = [self.engine_args, own["engine_args"]]
        try:
            options = CheckedOptions.model_validate(merged)
            options.check()
        except ValidationError as error:
            lines = [explain(each, ModelOptions.model_fields, own) for each in error.errors()]
            raise SettingsError("\n".join(f"{entry}: {line}" for line in lines)) from None
        except SettingsError as error:
            raise SettingsError(f"{entry}: {error}") from None
        return options


OPTIONS = in_order(ServeSettings.model_fields)


def load(given: Mapping[str, Any]) -> ServeSettings:
    """The settings with the given command line, which wins over the environment.

    Raises SettingsError with one line for each value that cannot be used.
    """
    try:
        settings = ServeSettings(**given)
    except ValidationError as error:
        lines = [explain(each, OPTIONS, given) for each in error.errors()]
        raise SettingsError("\n".join(lines)) from None
    _ = settings.each
    return settings


def _refuse_same_names(each: Sequence[CheckedOptions]) -> None:
    numbers: dict[str, int] = {}
    for number, options in enumerate(each):
        for name in (options.name, *(adapter.name for adapter in options.adapters)):
            if (first := numbers.setdefault(name, number)) != number:
                raise SettingsError(
                    f"models[{first}] and models[{number}] are both served as {name!r}; "
                    "give each a served_model_name of its own, or its adapter another name"
                )
