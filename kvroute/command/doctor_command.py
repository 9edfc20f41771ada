"""The command `kvroute doctor`."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from kvroute.client import FIND, Url
from kvroute.command.tables import Column, print_table, prose
from kvroute.wording import plural

if TYPE_CHECKING:
    from kvroute.doctor.checks import Check

STYLES = {"wrong": "bold red", "warning": "yellow", "ok": "green"}  # the worst grade comes first


def doctor(
    url: Url = FIND,
    audit: Annotated[
        bool,
        typer.Option(
            "--audit",
            help="Also compare which blocks the engines have cached with what replicas, Redis and "
            "a router know of it; this stops each engine for some milliseconds.",
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
        _show(checks)
    raise typer.Exit(1 if any(check.grade == "wrong" for check in checks) else 0)


def _show(checks: "Sequence[Check]") -> None:
    """Print a summary, then a table of all checks, the worst grades first."""
    counts = Counter(check.grade for check in checks)
    problems = [f"{counts[grade]} {grade}" for grade in ("wrong", "warning") if counts[grade]]
    summary = f"{', '.join(problems)}, {counts['ok']} ok" if problems else "everything is ok"
    worst = min((check.grade for check in checks), key=[*STYLES].index)
    Console(highlight=False).print(
        Text(f"{plural(len(checks), 'check')}: {summary}\n", STYLES[worst])
    )
    columns = (Column("grade"), Column("check"), prose("finding, and what to do"))
    ranked = sorted(checks, key=lambda check: [*STYLES].index(check.grade))
    print_table(columns, [_row(check) for check in ranked])


def _row(check: "Check") -> list[str | Text]:
    style = STYLES[check.grade]
    finding = Text(check.finding)
    if check.remedy:
        finding.append(f"\n-> {check.remedy}", style)
    return [Text(check.grade, style), check.name, finding]
