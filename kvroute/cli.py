"""The Typer application of the command `kvroute`."""

import importlib.metadata
from collections.abc import Callable
from typing import Annotated, Any

import typer

from kvroute.command.batch_command import batch
from kvroute.command.doctor_command import doctor
from kvroute.command.explain import explain
from kvroute.command.help_page import HelpfulCommand, brief_command, typer_app
from kvroute.command.option_classes import basic_options, with_options
from kvroute.command.replay_command import replay
from kvroute.command.replay_options import ReplayOptions
from kvroute.command.scale_command import drain, scale
from kvroute.command.serve_command import AttachOptions, ServeOptions, attach, serve
from kvroute.command.status_command import status
from kvroute.features import FEATURES

# The headings of the groups of commands in --help.
RUN = "Run a cluster"
WATCH = "Watch a running cluster"
PLAN = "Plan"

GROUPS = {"batch": batch}

app = typer_app(no_args_is_help=True)


def main() -> None:
    # Without the name, a cluster that another command starts would name itself `-c` in its errors.
    app(prog_name="kvroute")


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


def _add(run: Callable[[Any], None], options: type, topic: str) -> None:
    """Add a command with many options, whose --help shows only the basic ones."""
    command = app.command(
        run.__name__, cls=brief_command(basic_options(options)), rich_help_panel=topic
    )
    command(with_options(run, options))


_add(serve, ServeOptions, RUN)
_add(attach, AttachOptions, RUN)
app.command(cls=HelpfulCommand, rich_help_panel=RUN)(scale)
app.command(cls=HelpfulCommand, rich_help_panel=RUN)(drain)
for name, group in GROUPS.items():
    app.add_typer(group, name=name, rich_help_panel=RUN)
for feature in FEATURES:
    for name, commands in feature.commands().items():
        if not isinstance(commands, typer.Typer):
            app.command(name, cls=HelpfulCommand, rich_help_panel=WATCH)(commands)
        elif name in GROUPS:
            GROUPS[name].add_typer(commands)
        else:
            app.add_typer(commands, name=name, rich_help_panel=RUN)
app.command(cls=HelpfulCommand, rich_help_panel=WATCH)(status)
app.command(cls=HelpfulCommand, rich_help_panel=WATCH)(explain)
app.command(cls=HelpfulCommand, rich_help_panel=WATCH)(doctor)
_add(replay, ReplayOptions, PLAN)
