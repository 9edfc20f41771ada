"""The commands `kvroute serve` and `kvroute attach`; their options come from the settings."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, make_dataclass
from typing import Annotated, Any

import typer
from pydantic.fields import FieldInfo

from kvroute.client import fail
from kvroute.command.help_page import HelpfulCommand, typer_app
from kvroute.command.option_classes import BASIC, with_options
from kvroute.settings.help import NO_ARGUMENTS, SettingsError, env_names, flags, option
from kvroute.settings.serve import OPTIONS, ServeSettings, load


def serve(command_line: Any) -> None:
    """Start a cluster and serve it until Ctrl-C."""
    from kvroute.local.launch import run

    raise typer.Exit(run(_settings(asdict(command_line), NO_ARGUMENTS)))


def attach(command_line: Any) -> None:
    """Route requests to vLLM servers that you run already, until Ctrl-C.

    kvroute starts no engine. It prefers the server that has cached most of a prompt. The options
    are those of kvroute serve. Those that need a cluster work only with kvroute serve --attach.
    """
    from kvroute.gateway.start_gateway import run

    raise typer.Exit(run(_settings(asdict(command_line), {"attach": "URL"})))


def _settings(values: Mapping[str, Any], arguments: Mapping[str, str]) -> ServeSettings:
    """Return the settings; end the command if a value cannot be used."""
    command_line = {name: value for name, value in values.items() if value not in (None, [], ())}
    try:
        return load(command_line, arguments)
    except SettingsError as error:
        raise fail(str(error)) from None


def parsed(options: Sequence[str]) -> ServeSettings:
    """Return the settings that `kvroute serve` would have with these options."""
    app = typer_app()
    app.command("serve", cls=HelpfulCommand)(with_options(serve, ServeOptions))
    context = typer.main.get_command(app).make_context("kvroute serve", list(options))
    return _settings(context.params, NO_ARGUMENTS)


def _annotation(command: str, name: str, field: FieldInfo) -> Any:
    """Return the annotation of a command's option; its value is None if it is not set."""
    description = option(field)
    kind: Any = description.kind or field.annotation
    typer_option = typer.Option(
        *flags(name, field),
        help=f"{description.help} "
        f"[default: {_default(field)}; {', '.join(env_names(name, field))}]",
        show_default=False,
        rich_help_panel=description.group,
    )
    if command in description.basic:
        return Annotated[kind | None, typer_option, BASIC]
    return Annotated[kind | None, typer_option]


def _fields(command: str) -> list[tuple[str, Any, Any]]:
    return [(name, _annotation(command, name, field), None) for name, field in OPTIONS.items()]


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


_SERVERS = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="URL",
        help="Address of a server: http://HOST:PORT. --attach-file names a file of addresses.",
        show_default=False,
    ),
    BASIC,
]

# Classes with one field per option.
ServeOptions = make_dataclass("ServeOptions", _fields("serve"))
AttachOptions = make_dataclass(  # here, --attach is replaced by arguments
    "AttachOptions",
    [("attach", _SERVERS, None), *(field for field in _fields("attach") if field[0] != "attach")],
)
