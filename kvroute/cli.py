"""The Typer application of the command `kvroute`."""

import importlib.metadata
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Column, Table

from kvroute.client import FIND, Model, Url, call, fail, with_model
from kvroute.command.doctor_command import doctor
from kvroute.command.explain import explain
from kvroute.command.help_page import HelpfulCommand, typer_app
from kvroute.command.keys_command import keys
from kvroute.command.prefixes_command import prefixes
from kvroute.command.replay_command import replay
from kvroute.command.serve_command import Serve
from kvroute.command.tenants_command import tenants
from kvroute.doctor.seat_checks import seated

COLUMNS = ("id", "node", "pid", "blocks", "running", "waiting", "incarnation")

RUN = "Run a cluster"
WATCH = "Watch a running cluster"
PLAN = "Plan"

app = typer_app(no_args_is_help=True)


def main() -> None:
    app()


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvroute {importlib.metadata.version('kvroute')}")
        raise typer.Exit


@app.callback()
def kvroute(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """Serve a language model on many replicas, each prompt where its prefix is cached."""


app.command("serve", cls=HelpfulCommand, rich_help_panel=RUN)(Serve)


@app.command(cls=HelpfulCommand, rich_help_panel=WATCH)
def status(url: Url = FIND) -> None:
    """Show the replicas of a running cluster, and the requests that wait for them."""
    cluster, console = call("GET", url, "/v1/cluster"), Console()
    console.print(_table(cluster["replicas"]))
    for replica in cluster["replicas"]:
        if reason := replica["degraded"]:
            console.print(f"{replica['id']} is DEGRADED, so its cache is ignored: {reason}")
    for line in sorted({*filter(None, map(_parsers, cluster["replicas"]))}):
        console.print(line)
    for queue in cluster.get("queues", ()):
        if queue["all_routers"]["requests"]:
            console.print(_queued(queue))
    for seats in cluster.get("seats", ()):
        if seats["is_limited"]:
            console.print(seated(seats))


@app.command(cls=HelpfulCommand, rich_help_panel=RUN)
def scale(
    replicas: Annotated[
        int, typer.Argument(metavar="REPLICAS", help="The new number of replicas.")
    ],
    model: Model = None,
    url: Url = FIND,
) -> None:
    """Add replicas to a running cluster, or remove some. No request is lost."""
    from kvroute.command.scale import ScaleError
    from kvroute.command.scale import scale as scale_to
    from kvroute.local.progress import Progress

    if replicas < 1:
        fail(f"REPLICAS is {replicas}; at least 1 must run. To stop all, end kvroute serve")
    try:
        address = call("GET", url, "/v1/cluster")["ray_address"]
        scale_to(replicas, _scaled_model(model, url), address, Progress())
    except ScaleError as error:
        fail(str(error))
    except KeyboardInterrupt:
        fail("stopped waiting; the cluster continues to scale")


def _scaled_model(model: str | None, url: str) -> str | None:
    """Return the model whose replicas are scaled; None if the cluster has only one model."""
    cards = call("GET", url, "/v1/models")["data"]
    served = [card["id"] for card in cards if card["parent"] is None]  # adapters have one
    if len(served) > 1 and model is None:
        fail(f"the cluster serves several models; set --model to one of {', '.join(served)}")
    if model not in (None, *served):
        fail(f"--model is {model!r}; expected one of {', '.join(served)}")
    return model if len(served) > 1 else None


def _table(replicas: list[dict[str, Any]]) -> Table:
    columns = with_model(COLUMNS, replicas)
    table = Table(*(Column(column, overflow="fold") for column in columns))
    for replica in replicas:
        capacity = replica["capacity_blocks"] + replica.get("host", {}).get("blocks", 0)
        blocks = f"{replica['blocks']} / {capacity}"
        cells = replica | {"blocks": blocks}
        table.add_row(*(str(cells[column]) for column in columns))
    return table


def _parsers(replica: dict[str, Any]) -> str:
    """Return a line about vLLM's parsers for the replica's model, or ""."""
    parsers = {"tool calls": replica["tool_parser"], "reasoning": replica["reasoning_parser"]}
    parts = [f"{part} with the parser {parser}" for part, parser in parsers.items() if parser]
    return f"{replica['model']}: vLLM reads {' and '.join(parts)}" if parts else ""


def _queued(queue: dict[str, Any]) -> str:
    everywhere = queue["all_routers"]
    return (
        f"{everywhere['requests']} requests for {queue['model']} wait for a replica with room: "
        f"{everywhere['prefill_s']:.1f} s of prefill, {queue['requests']} of them in the router "
        f"that answered, the oldest for {queue['oldest_s']:.1f} s"
    )


app.command(cls=HelpfulCommand, rich_help_panel=WATCH)(explain)
app.command(cls=HelpfulCommand, rich_help_panel=WATCH)(doctor)
app.command(cls=HelpfulCommand, rich_help_panel=WATCH)(tenants)
app.add_typer(prefixes, name="prefixes", rich_help_panel=RUN)
app.add_typer(keys, name="keys", rich_help_panel=RUN)
app.command(cls=HelpfulCommand, rich_help_panel=PLAN)(replay)
