"""The command `kvroute doctor`."""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from inspect import Parameter, signature
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from kvroute.client import FIND, GivenUrl, fail, find_url
from kvroute.command.serve_command import parsed
from kvroute.command.tables import Column, print_table, prose
from kvroute.features import DOCTOR_REQUESTS
from kvroute.wording import plural

if TYPE_CHECKING:
    from kvroute.doctor.checks import Check
    from kvroute.features.feature import DoctorRequest

STYLES = {"wrong": "bold red", "warning": "yellow", "ok": "green"}  # the worst grade comes first


def doctor(
    url: GivenUrl = FIND,
    before_start: Annotated[
        bool,
        typer.Option(
            "--before-start",
            help="Check this machine instead, before a cluster is started on it. The options of "
            "kvroute serve follow after --.",
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")] = False,
    serve_options: Annotated[
        list[str] | None,
        typer.Argument(metavar="-- OPTIONS", help="Options of kvroute serve for --before-start."),
    ] = None,
    **chosen: bool,
) -> None:
    """Check a running cluster, and send a small test request to each replica.

    The exit code is 1 if something is wrong, else 0, even with warnings.
    """
    if serve_options and not before_start:
        fail(
            f"{' '.join(serve_options)} is unexpected; options of kvroute serve belong to "
            "kvroute doctor --before-start"
        )
    if before_start:
        checks = list(_machine_checks(serve_options or []))
    else:
        checks = _cluster_checks(
            find_url(url), [each for each in DOCTOR_REQUESTS if not each.help or chosen[each.name]]
        )
    if as_json:
        typer.echo(json.dumps([asdict(check) for check in checks]))
    else:
        _show(checks)
    raise typer.Exit(1 if any(check.grade == "wrong" for check in checks) else 0)


_OPTIONS = [
    Parameter(
        request.name,
        Parameter.KEYWORD_ONLY,
        default=False,
        annotation=Annotated[bool, typer.Option(f"--{request.name}", help=request.help)],
    )
    for request in DOCTOR_REQUESTS
    if request.help
]
_signature = signature(doctor)
doctor.__signature__ = _signature.replace(  # type: ignore[attr-defined]  # Typer reads it
    parameters=[*[*_signature.parameters.values()][:-1], *_OPTIONS]
)


def _cluster_checks(url: str, further: "Sequence[DoctorRequest]") -> "list[Check]":
    from kvroute.doctor.collect import collect_checks

    with Console(stderr=True).status("connecting to the cluster") as status:
        return list(collect_checks(url, further, status.update))


def _machine_checks(serve_options: "Sequence[str]") -> "Iterator[Check]":
    """Yield what `kvroute serve` with these options would check before it starts anything."""
    from kvroute.doctor.checks import Check
    from kvroute.local.before_start import before_start

    for name, problems in before_start(parsed(serve_options)):
        for problem in problems:
            finding, _, remedy = problem.text.partition("; ")
            yield Check(name, "wrong" if problem.is_final else "warning", finding, remedy)
        if not problems:
            yield Check(name, "ok", "no problem found")


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
