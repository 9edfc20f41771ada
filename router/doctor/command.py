"""`kvroute doctor`: what is wrong with a running cluster, and what to do about it."""

import json
from collections.abc import Iterable
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from router.command.client import LOCAL, Url
from router.doctor.checks import Check
from router.doctor.examination import examine

STYLES = {"ok": "green", "warning": "yellow", "wrong": "bold red"}


def doctor(
    url: Url = LOCAL,
    audit: Annotated[
        bool,
        typer.Option(
            "--audit",
            help="Compare engines, replicas, Redis and a router as well, block by block; each "
            "engine stands still for milliseconds.",
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="For scripts.")] = False,
) -> None:
    """Examine a running cluster, and send each replica a tiny request of our own.

    The exit code is 0 when nothing is wrong (there may be warnings), and 1 when something is.
    """
    with Console(stderr=True).status("asking who is there") as status:
        checks = list(examine(url, audit=audit, step=status.update))
    if as_json:
        typer.echo(json.dumps([asdict(check) for check in checks]))
    else:
        Console().print(_table(checks))
    raise typer.Exit(1 if any(check.grade == "wrong" for check in checks) else 0)


def _table(checks: Iterable[Check]) -> Table:
    table = Table("check", "", "finding, and what to do")
    for check in checks:
        grade, finding = Text(check.grade, STYLES[check.grade]), Text(check.finding)
        if check.remedy:
            finding.append(f"\n-> {check.remedy}", STYLES[check.grade])
        table.add_row(Text(check.name), grade, finding)
    return table
