"""The Typer application of the command `kvroute`."""

import importlib.metadata
from typing import Annotated

import typer

from kvroute.command.batches_command import batch
from kvroute.command.changes.adapters_command import adapters
from kvroute.command.changes.keys_command import keys
from kvroute.command.changes.prefixes_command import prefixes
from kvroute.command.doctor_command import doctor
from kvroute.command.drain_command import drain
from kvroute.command.explain import explain
from kvroute.command.help_page import HelpfulCommand, typer_app
from kvroute.command.option_classes import with_options
from kvroute.command.replay_command import replay
from kvroute.command.replay_options import ReplayOptions
from kvroute.command.scale_command import scale
from kvroute.command.serve_command import Attach, Serve
from kvroute.command.status import status
from kvroute.command.tenants_command import tenants

# The headings of the groups of commands in --help.
RUN = "Run a cluster"
WATCH = "Watch a running cluster"
PLAN = "Plan"

app = typer_app(no_args_is_help=True)


def main() -> None:
    app()


def _print_version(is_set: bool) -> None:
    if is_set:
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
app.command("attach", cls=HelpfulCommand, rich_help_panel=RUN)(Attach)
app.command(cls=HelpfulCommand, rich_help_panel=RUN)(scale)
app.command(cls=HelpfulCommand, rich_help_panel=RUN)(drain)
app.add_typer(prefixes, name="prefixes", rich_help_panel=RUN)
app.add_typer(adapters, name="adapters", rich_help_panel=RUN)
app.add_typer(keys, name="keys", rich_help_panel=RUN)
app.add_typer(batch, name="batch", rich_help_panel=RUN)
app.command(cls=HelpfulCommand, rich_help_panel=WATCH)(status)
app.command(cls=HelpfulCommand, rich_help_panel=WATCH)(explain)
app.command(cls=HelpfulCommand, rich_help_panel=WATCH)(doctor)
app.command(cls=HelpfulCommand, rich_help_panel=WATCH)(tenants)
app.command("replay", cls=HelpfulCommand, rich_help_panel=PLAN)(with_options(replay, ReplayOptions))
