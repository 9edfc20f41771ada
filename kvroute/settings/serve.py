"""The settings of a cluster, from the command line, the environment and the defaults."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from pydantic import ValidationError
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from kvroute.settings.checked_options import CheckedOptions
from kvroute.settings.help import NO_ARGUMENTS, EnvironmentVariables, SettingsError, explain
from kvroute.settings.model_settings import Detected, ModelSettings, resolve
from kvroute.settings.needs import refuse_unmet
from kvroute.settings.options.cluster import Options
from kvroute.settings.options.common import in_order
from kvroute.settings.options.model import PER_MODEL, ModelOptions
from kvroute.store.keys import DEFAULT_CLUSTER


class ServeSettings(CheckedOptions, Options, BaseSettings):
    """All options of `kvroute serve`. If there is one model, these are also its options."""

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
        return init_settings, EnvironmentVariables(settings_cls)

    @cached_property
    def per_model(self) -> tuple[CheckedOptions, ...]:
        """Return the options of each model. Raises SettingsError if a model cannot be served."""
        names = [name.strip() for name in self.model.split(",")]
        if self.models and "model" in self.model_fields_set:
            raise SettingsError(
                f"--model is {self.model!r}, and --models is set as well; keep one of them"
            )
        entries = self.models or [{"model": name} for name in names]
        if self.lora and len(entries) > 1:
            raise SettingsError(
                f"--lora is {','.join(self.lora)!r}, but there are several models; move it to the "
                'entry of one model in --models, as "lora": ["NAME=PATH"]'
            )
        if not self.models and names == [self.model]:
            self.check()
            refuse_unmet((self,), ModelOptions.model_fields)
            return (self,)
        models = tuple(
            self._model_options(f"models[{number}]", entry) for number, entry in enumerate(entries)
        )
        _refuse_same_names(models)
        # An option for all models needs one model on which it has an effect.
        refuse_unmet(models, {*ModelOptions.model_fields}.difference(*entries))
        return models

    def resolve(
        self,
        detected: Sequence[Detected] | None = None,
        *,
        redis_url: str | None = None,
        cluster: str = DEFAULT_CLUSTER,
        local_only: bool = False,
    ) -> tuple[ModelSettings, ...]:
        """Return the settings of each model, completed with the facts of the machine.

        Args:
            detected: for each model, what depends on the machine; None: derive it from the options.
            redis_url: URL of the Redis to use if the options do not set one.
            cluster: the cluster's id to use if the options do not set one.
            local_only: see RouterSettings.

        Raises:
            SettingsError: neither the options nor the arguments set redis_url.
        """
        redis_url = self.redis_url or redis_url
        if redis_url is None:
            raise SettingsError("redis_url is missing; set a URL, such as redis://127.0.0.1:6379")
        models = self.per_model
        detected = detected or [
            Detected(model.model, model.gpus_per_replica or 0) for model in models
        ]
        replicas = sum(model.fleet_size for model in models)
        return tuple(
            resolve(
                model,
                facts,
                redis_url=redis_url,
                own_redis=self.redis_url is None,
                cluster=self.cluster or cluster,
                local_only=local_only,
                drain_timeout_s=self.drain_timeout_s,
                other_replicas=replicas - model.fleet_size,
            )
            for model, facts in zip(models, detected, strict=True)
        )

    def _model_options(self, entry: str, overrides: Mapping[str, Any]) -> CheckedOptions:
        """Return the options of one of several models.

        Args:
            entry: the model's entry, as error messages name it, such as `models[0]`.
            overrides: the options in this entry; they replace those for all models, except that
                the engine arguments of both are merged.
        """
        if unknown := sorted(overrides.keys() - PER_MODEL):
            raise SettingsError(
                f"{entry}: {unknown[0]} cannot be set for one model; the options that can are "
                f"{', '.join(PER_MODEL)}"
            )
        common = {name: getattr(self, name) for name in ModelOptions.model_fields}
        merged = {**common, **overrides}
        if "engine_args" in overrides:
            merged["engine_args"] = [self.engine_args, overrides["engine_args"]]
        try:
            options = CheckedOptions.model_validate(merged)
            options.check()
            refuse_unmet((options,), overrides)
        except ValidationError as error:
            fields = ModelOptions.model_fields
            lines = [explain(details, fields, overrides) for details in error.errors()]
            raise SettingsError("\n".join(f"{entry}: {line}" for line in lines)) from None
        except SettingsError as error:
            raise SettingsError(f"{entry}: {error}") from None
        return options


OPTIONS = in_order(ServeSettings.model_fields)  # name of each option -> its field


def load(
    command_line: Mapping[str, Any], arguments: Mapping[str, str] = NO_ARGUMENTS
) -> ServeSettings:
    """Return a cluster's settings. Options in `command_line` have priority over the environment.

    Args:
        command_line: the options on the command line.
        arguments: options that the command has as arguments, and the names of these.

    Raises:
        SettingsError: some values cannot be used; the message has one line for each.
    """
    try:
        settings = ServeSettings(**command_line)
    except ValidationError as error:
        lines = [explain(details, OPTIONS, command_line, arguments) for details in error.errors()]
        raise SettingsError("\n".join(lines)) from None
    _ = settings.per_model  # check the models now, so that errors are raised
    return settings


def _refuse_same_names(models: Sequence[CheckedOptions]) -> None:
    numbers: dict[str, int] = {}
    for number, options in enumerate(models):
        for name in (options.name, *(adapter.name for adapter in options.adapters)):
            if (first := numbers.setdefault(name, number)) != number:
                raise SettingsError(
                    f"models[{first}] and models[{number}] are both served as {name!r}; "
                    "set a different served_model_name for one of them, or rename the adapter"
                )
