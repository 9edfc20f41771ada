"""The command `kvroute serve`, whose options are generated from the settings."""

from dataclasses import asdict, make_dataclass
from typing import Annotated, Any, Literal, get_args, get_origin

import typer
from pydantic.fields import FieldInfo

from kvroute.client import fail
from kvroute.settings.help import SettingsError, env_names, flags, option
from kvroute.settings.serve import OPTIONS, load


def serve(command_line: Any) -> None:
    """Start a cluster and serve it until Ctrl-C."""
    from kvroute.local.launch import run

    given = asdict(command_line)
    try:
        settings = load({name: value for name, value in given.items() if value not in (None, [])})
    except SettingsError as error:
        fail(str(error))
    raise typer.Exit(run(settings))


def _annotation(name: str, field: FieldInfo) -> Any:
    """The option for Typer; its value is None when the command line omits it."""
    described = option(field)
    default = described.default or field.default or "none"
    kind: Any = described.kind or field.annotation
    choices = ", ".join(_choices(kind))
    text = f"{described.help} One of {choices}." if choices else described.help
    given = typer.Option(
        *flags(name, field),
        help=f"{text} (default: {default}; {', '.join(env_names(name, field))})",
        metavar="<choice>" if choices else None,  # short, to leave room for the help texts
        show_default=False,
        rich_help_panel=described.group,
    )
    return Annotated[kind | None, given]


def _choices(kind: Any) -> tuple[str, ...]:
    """The values of a Literal, or of an optional Literal."""
    kinds = (kind, *get_args(kind))
    return next((get_args(each) for each in kinds if get_origin(each) is Literal), ())


Serve = make_dataclass(  # Typer makes each field an option, and calls the class with the values
    "Serve",
    [(name, _annotation(name, field), None) for name, field in OPTIONS.items()],
    namespace={"__post_init__": serve, "__doc__": serve.__doc__},
)
