"""The command `kvroute serve`, whose options are generated from the settings."""

from dataclasses import asdict, make_dataclass
from typing import Annotated, Any

import typer
from pydantic.fields import FieldInfo

from kvroute.client import fail
from kvroute.settings.help import SettingsError, env_names, flags, option
from kvroute.settings.serve import OPTIONS, load


def serve(command_line: Any) -> None:
    """Start a cluster and serve it until Ctrl-C."""
    from kvroute.local.launch import run

    values = asdict(command_line)
    try:
        settings = load({name: value for name, value in values.items() if value not in (None, [])})
    except SettingsError as error:
        fail(str(error))
    raise typer.Exit(run(settings))


def _annotation(name: str, field: FieldInfo) -> Any:
    """Return the annotation of an option for Typer; its value is None if it is not set."""
    description = option(field)
    kind: Any = description.kind or field.annotation
    typer_option = typer.Option(
        *flags(name, field),
        help=f"{description.help} "
        f"[default: {_default(field)}; {', '.join(env_names(name, field))}]",
        show_default=False,
        rich_help_panel=description.group,
    )
    return Annotated[kind | None, typer_option]


def _default(field: FieldInfo) -> str:
    """Return the default of an option in words."""
    match field.default:
        case _ if text := option(field).default:
            return text
        case bool(is_on):
            return "on" if is_on else "off"
        case float(number):
            return f"{number:g}"
        case None | "" | []:
            return "none"
        case other:
            return str(other)


# Typer makes an option of each field, and calls the class with the values from the command line.
Serve = make_dataclass(
    "Serve",
    [(name, _annotation(name, field), None) for name, field in OPTIONS.items()],
    namespace={"__post_init__": serve, "__doc__": serve.__doc__},
)
