"""The command `kvroute`: serve a cluster, or look at one."""

import importlib.metadata
import inspect
from typing import Annotated, Any

import typer
from pydantic.fields import FieldInfo
from rich.console import Console
from rich.table import Column, Table

from router.command.client import LOCAL, Model, Url, call, fail, with_model
from router.command.explain import explain
from router.command.options import SettingsError, env_names, flags, option
from router.command.prefixes_command import prefixes
from router.doctor.command import doctor
from router.replay.calibrate import calibrate
from router.replay.command import replay
from router.settings import ServeSettings, load

COLUMNS = ("id", "node", "pid", "blocks", "running", "waiting", "incarnation")

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)


def main() -> None:
    app()


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvroute {importlib.metadata.version('kvroute')}")
        raise typer.Exit


@app.callback()
def kvroute(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Serve a language model on many replicas, each prompt where its prefix is cached."""


def serve(**given: Any) -> None:
    """Start a cluster and serve it until Ctrl-C."""
    from router.command.launch import run

    try:
        settings = load({name: value for name, value in given.items() if value not in (None, [])})
    except SettingsError as error:
        fail(str(error))
    raise typer.Exit(run(settings))


@app.command()
def status(url: Url = LOCAL) -> None:
    """Show the replicas of a running cluster."""
    replicas, console = call("GET", url, "/v1/cluster")["replicas"], Console()
    console.print(_table(replicas))
    for replica in replicas:
        if reason := replica["degraded"]:
            console.print(f"{replica['id']} is DEGRADED, its cache counts for nothing: {reason}")


@app.command()
def scale(
    replicas: Annotated[int, typer.Argument(help="How many there shall be.", show_default=False)],
    model: Model = None,
    url: Url = LOCAL,
) -> None:
    """Add replicas to a running cluster, or take some away; no request is lost over it."""
    from router.command.progress import Progress
    from router.command.scale import ScaleError
    from router.command.scale import scale as scale_to

    if replicas < 1:
        fail(f"REPLICAS is {replicas}; at least 1 stays. Ctrl-C of kvroute serve ends them all")
    try:
        address = call("GET", url, "/v1/cluster")["ray_address"]
        scale_to(replicas, _whose(model, url), address, Progress())
    except ScaleError as error:
        fail(str(error))
    except KeyboardInterrupt:
        fail("not waited for; the cluster goes on with it")


def _whose(model: str | None, url: str) -> str | None:
    """The model whose replicas are meant; None where there is one only."""
    cards = call("GET", url, "/v1/models")["data"]
    served = [card["id"] for card in cards if "parent" not in card]  # no adapter
    if len(served) > 1 and model is None:
        fail(f"which model? Say --model; there are {', '.join(served)}")
    if model not in (None, *served):
        fail(f"--model is {model!r}; there are {', '.join(served)}")
    return model if len(served) > 1 else None


def _table(replicas: list[dict[str, Any]]) -> Table:
    columns = with_model(COLUMNS, replicas)
    table = Table(*(Column(column, overflow="fold") for column in columns))
    for replica in replicas:
        blocks = f"{replica['blocks']} / {replica['capacity_blocks']}"
        cells = replica | {"blocks": blocks}
        table.add_row(*(str(cells[column]) for column in columns))
    return table


def _parameter(name: str, field: FieldInfo) -> inspect.Parameter:
    """The setting as an option of `kvroute serve`; None where the command line leaves it open."""
    given = typer.Option(
        None,
        *flags(name, field),
        help=f"{option(field).help} ({_default(field)}; {', '.join(env_names(name, field))})",
        show_default=False,
        rich_help_panel=option(field).group,
    )
    kind: Any = option(field).kind or field.annotation
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=given, annotation=kind | None
    )


def _default(field: FieldInfo) -> str:
    return f"default: {option(field).default or field.default or 'none'}"


serve.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
    [_parameter(name, field) for name, field in ServeSettings.model_fields.items()]
)
app.command()(serve)
app.command()(doctor)
app.command()(explain)
app.command()(replay)
app.command()(calibrate)
app.add_typer(prefixes, name="prefixes")
