"""Derives an option's flags, environment variables and error messages from its description."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import PydanticBaseSettingsSource

ENV_PREFIX = "KVROUTE_"
WORDING = {  # pydantic's wording -> kvroute's
    "Input should be": "expected",
    "greater than or equal to": "at least",
    "less than or equal to": "at most",
    "greater than": "more than",
}


@dataclass(frozen=True, slots=True)
class Option:
    """The description of an option for users, in the metadata of the option's field."""

    group: str
    help: str
    example: str = ""  # a good value, if the default value is not one
    default: str = ""  # the default in words, if it has no value
    flags: tuple[str, ...] = ()  # flags that replace --the-field-name
    env: tuple[str, ...] = ()  # variables in addition to KVROUTE_THE_FIELD_NAME, of other systems
    kind: Any = None  # the option's type on the command line; None: the field's type


class SettingsError(ValueError):
    """A setting cannot be used; the message has its source and the remedy."""


class Environment(PydanticBaseSettingsSource):
    """Settings from environment variables, for options that the command line omits.

    An option can have several variables. pydantic-settings' own class takes the first one; this
    class rejects variables with different values.
    """

    def __call__(self) -> dict[str, Any]:
        fields = self.settings_cls.model_fields
        values = {
            name: self.get_field_value(field, name)[0]
            for name, field in fields.items()
            if name not in self.current_state
        }
        return {name: value for name, value in values.items() if value is not None}

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        variables = from_environment(field_name, field)
        _refuse_contradiction(field_name, field, variables)
        return next(iter(variables.values()), None), field_name, False


def option(field: FieldInfo) -> Option:
    """Return the field's description."""
    return next(entry for entry in field.metadata if isinstance(entry, Option))


def flags(name: str, field: FieldInfo) -> tuple[str, ...]:
    """Return the field's names on the command line, the usual one first."""
    return option(field).flags or (f"--{name.replace('_', '-')}",)


def env_names(name: str, field: FieldInfo) -> tuple[str, ...]:
    """Return the field's names in the environment, kvroute's first."""
    return f"{ENV_PREFIX}{name.upper()}", *option(field).env


def from_environment(name: str, field: FieldInfo) -> dict[str, str]:
    """Return the environment variables that set the field; empty variables count as not set."""
    return {env: os.environ[env] for env in env_names(name, field) if os.environ.get(env)}


def explain(
    details: Mapping[str, Any], fields: Mapping[str, FieldInfo], given: Mapping[str, Any]
) -> str:
    """Explain a validation error: `KVROUTE_PORT is 'abc'; expected a valid integer, such as 8000`.

    Args:
        details: the error, as pydantic describes it.
        fields: all options.
        given: options from the command line; all others are from the environment.
    """
    name = str(details["loc"][0])
    if name not in fields:
        return f"{name} is not a setting; the settings are {', '.join(fields)}"
    field = fields[name]
    source = flags(name, field)[0] if name in given else next(iter(from_environment(name, field)))
    return (
        f"{source} is {details['input']!r}; {expectation(details['msg'])}, "
        f"such as {option(field).example or field.default}"
    )


def expectation(message: str) -> str:
    """Reword pydantic's message about a wrong value, for example to `expected a valid integer`."""
    expected = message.split(", unable")[0]
    for pydantics, own in WORDING.items():
        expected = expected.replace(pydantics, own)
    return expected


def _refuse_contradiction(name: str, field: FieldInfo, variables: Mapping[str, str]) -> None:
    meanings = {repr(_meaning(field, value)) for value in variables.values()}
    if len(meanings) > 1:
        values = " but ".join(f"{env} is {value!r}" for env, value in variables.items())
        flag = flags(name, field)[0].replace("/", " or ")
        raise SettingsError(f"{values}, and both set the same option; keep one, or use {flag}")


def _meaning(field: FieldInfo, value: str) -> object:
    kind: TypeAdapter[object] = TypeAdapter(field.annotation or str)
    try:
        return kind.validate_python(value)
    except ValidationError:
        return value
