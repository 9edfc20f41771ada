"""The commands `kvroute serve` and `kvroute attach`; their options come from the settings."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, make_dataclass
from typing import Annotated, Any

import typer
from pydantic.fields import FieldInfo

from kvroute.client import fail
from kvroute.command.help_page import HelpfulCommand, typer_app
from kvroute.settings.help import NO_ARGUMENTS, SettingsError, env_names, flags, option
from kvroute.settings.serve import OPTIONS, ServeSettings, load


def serve(command_line: Any) -> None:
    """Start a cluster and serve it until Ctrl-C."""
    _run(asdict(command_line))


def attach(command_line: Any) -> None:
    """Route requests to vLLM servers that you run already, until Ctrl-C.

    kvroute starts no engine. It prefers the server that has cached most of a prompt. The options
    are those of kvroute serve.
    """
    _run(asdict(command_line), arguments={"attach": "URL"})


def _run(values: dict[str, Any], arguments: Mapping[str, str] = NO_ARGUMENTS) -> None:
    from kvroute.local.launch import run

    raise typer.Exit(run(_settings(values, arguments)))


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
    app.command("serve", cls=HelpfulCommand)(Serve)
    context = typer.main.get_command(app).make_context("kvroute serve", list(options))
    return _settings(context.params, NO_ARGUMENTS)


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


_FIELDS = [(name, _annotation(name, field), None) for name, field in OPTIONS.items()]
_SERVERS = Annotated[
    list[str], typer.Argument(metavar="URL", help="Address of a server: http://HOST:PORT.")
]

# A class with one field per option: Typer makes an option of each field, and then calls the class
# with the values. `__post_init__` runs the command.
Serve = make_dataclass(
    "Serve",
    _FIELDS,
    namespace={"__post_init__": serve, "__doc__": serve.__doc__},
)
Attach = make_dataclass(  # here, --attach is replaced by arguments
    "Attach",
    [("attach", _SERVERS), *(field for field in _FIELDS if field[0] != "attach")],
    namespace={"__post_init__": attach, "__doc__": attach.__doc__},
)
