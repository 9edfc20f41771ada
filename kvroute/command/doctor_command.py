"""The command `kvroute doctor`."""

import json
from collections.abc import Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvroute.client import FIND, Url

if TYPE_CHECKING:
    from kvroute.doctor.checks import Check

STYLES = {"ok": "green", "warning": "yellow", "wrong": "bold red"}


def doctor(
    url: Url = FIND,
    audit: Annotated[
        bool,
        typer.Option(
            "--audit",
            help="Also compare the cached blocks that engines, replicas, Redis and a router count; "
            "this blocks each engine for milliseconds.",
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")] = False,
) -> None:
    """Check a running cluster, and send a small test request to each replica.

    The exit code is 1 if something is wrong, else 0, even with warnings.
    """
    from kvroute.doctor.collect import collect_checks

    with Console(stderr=True).status("connecting to the cluster") as status:
        checks = list(collect_checks(url, audit=audit, step=status.update))
    if as_json:
        typer.echo(json.dumps([asdict(check) for check in checks]))
    else:
        Console().print(_table(checks))
    raise typer.Exit(1 if any(check.grade == "wrong" for check in checks) else 0)


def _table(checks: "Iterable[Check]") -> Table:
    table = Table("check", "", "finding, and what to do")
    for check in checks:
        grade, finding = Text(check.grade, STYLES[check.grade]), Text(check.finding)
        if check.remedy:
            finding.append(f"\n-> {check.remedy}", STYLES[check.grade])
        table.add_row(Text(check.name), grade, finding)
    return table
