"""Descriptions of options, and the flags, variables and error messages derived from them."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
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
NOT_A_CHOICE = re.compile(r"Value error, .* is not one of (.*?)\.?$", re.DOTALL)  # Typer's message


NO_ARGUMENTS: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Option:
    """The description of an option for users. The option's pydantic field has it as metadata."""

    group: str  # heading in --help and --help-all, such as "KV cache"
    help: str  # what the option does, in one or two sentences
    example: str = ""  # an example value for errors and documents; empty: the default value
    default: str = ""  # the default in words; empty: the default value itself
    flags: tuple[str, ...] = ()  # all flags of the option; empty: only --the-field-name
    env: tuple[str, ...] = ()  # variables besides KVROUTE_THE_FIELD_NAME, as other systems use them
    kind: Any = None  # type of the option on the command line; None: the type of the field
    # The commands whose --help shows the option, since most of their users need it; --help-all
    # shows all options.
    basic: tuple[str, ...] = ()


class SettingsError(ValueError):
    """A setting cannot be used. The message says where it was set, and how to correct it."""


class EnvironmentVariables(PydanticBaseSettingsSource):
    """Settings from environment variables, for options that the command line omits.

    An option can have several variables. Instead of using the first one, as pydantic-settings' own
    class does, this class raises SettingsError if they are set to different values.
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
    """Return the description of an option."""
    return next(entry for entry in field.metadata if isinstance(entry, Option))


def flags(name: str, field: FieldInfo) -> tuple[str, ...]:
    """Return the flags that set the field on the command line, the usual one first."""
    return option(field).flags or (f"--{name.replace('_', '-')}",)


def env_names(name: str, field: FieldInfo) -> tuple[str, ...]:
    """Return the environment variables that can set the field, kvroute's own first."""
    return f"{ENV_PREFIX}{name.upper()}", *option(field).env


def from_environment(name: str, field: FieldInfo) -> dict[str, str]:
    """Return the variables that set the field, and their values; ignore empty variables."""
    return {env: os.environ[env] for env in env_names(name, field) if os.environ.get(env)}


def explain(
    details: Mapping[str, Any],
    fields: Mapping[str, FieldInfo],
    command_line: Mapping[str, Any],
    arguments: Mapping[str, str] = NO_ARGUMENTS,
) -> str:
    """Explain an error to users: `KVROUTE_PORT is 'abc'; expected a valid integer, such as 8000`.

    Args:
        details: the error, as pydantic describes it.
        fields: the fields of all options.
        command_line: the options on the command line; all other options are from the environment.
        arguments: fields that the command has as arguments instead of options, and their names.
    """
    name = str(details["loc"][0])
    if name not in fields:
        return f"{name} is not a setting; the settings are {', '.join(fields)}"
    field = fields[name]
    if name in command_line:
        source = arguments.get(name) or flags(name, field)[0]
    else:
        source = next(iter(from_environment(name, field)))
    expected = expectation(details["msg"])
    if "such as" not in expected:
        expected += f", such as {option(field).example or field.default}"
    return f"{source} is {as_written(details['input'])}; {expected}"


def as_written(value: object) -> str:
    """Return a value as users wrote it: the values of a repeated option, without Python's list."""
    return ", ".join(map(repr, value)) if isinstance(value, list) else repr(value)


def expectation(message: str) -> str:
    """Reword pydantic's message about a wrong value, such as to `expected a valid integer`."""
    if choices := NOT_A_CHOICE.match(message):
        return f"expected one of {choices[1]}"
    expected = message.split(", unable")[0]
    for original, wording in WORDING.items():
        expected = expected.replace(original, wording)
    return expected


def _refuse_contradiction(name: str, field: FieldInfo, variables: Mapping[str, str]) -> None:
    meanings = {repr(_meaning(field, value)) for value in variables.values()}
    if len(meanings) > 1:
        values = " but ".join(f"{env} is {value!r}" for env, value in variables.items())
        flag = flags(name, field)[0].replace("/", " or ")
        raise SettingsError(f"{values}, and both set the same option; unset one, or use {flag}")


def _meaning(field: FieldInfo, value: str) -> object:
    """Parse a variable's value, so that `1` and `true` count as equal for a boolean option."""
    kind: TypeAdapter[object] = TypeAdapter(field.annotation or str)
    try:
        return kind.validate_python(value)
    except ValidationError:
        return value
