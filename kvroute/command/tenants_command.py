"""The command `kvroute tenants`."""

import csv
import json
import sys
from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Column, Table

from kvroute.client import FIND, Url, call, with_model

COLUMNS = (
    *("tenant", "requests", "prompt_tokens", "cached", "output_tokens"),
    *("gpu_seconds", "gpu_seconds_saved"),
)
CSV_COLUMNS = ("model", *COLUMNS, "failed")
CACHED = ("hit", "unexpected_hit")  # causes in the ledger that mean cached tokens


class Format(StrEnum):
    TABLE = "table"
    JSON = "json"
    CSV = "csv"


def tenants(
    since: Annotated[
        str | None,
        typer.Option(metavar="DATE", help="First day, UTC (default: 30 days up to the last one)."),
    ] = None,
    until: Annotated[
        str | None, typer.Option(metavar="DATE", help="Last day (default: today).")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Only this model.")] = None,
    format: Annotated[Format, typer.Option(help="Output format.")] = Format.TABLE,  # noqa: A002
    url: Url = FIND,
) -> None:
    """Show each tenant's requests, tokens, and GPU seconds spent and saved."""
    given = {"since": since, "until": until, "model": model}
    params = {name: value for name, value in given.items() if value is not None}
    usage = call("GET", url, "/v1/cluster/tenants", params=params)
    rows = [_row(account) for account in usage["data"]]  # the largest usage comes first
    if format is Format.JSON:
        typer.echo(json.dumps(usage, indent=1))
    elif format is Format.CSV:
        _print_csv(rows)
    else:
        Console().print(_table(rows))
        typer.echo(f"{usage['since']} to {usage['until']}, in UTC")


def _row(account: dict[str, Any]) -> dict[str, Any]:
    requests, tokens = account["requests"], account["prompt_tokens"]
    prompt_tokens = sum(tokens.values())
    cached = sum(tokens[cause] for cause in CACHED)
    return {
        "model": account["model"],
        "tenant": account["tenant"],
        "requests": sum(requests.values())
        - requests["failed"],  # a failed request usually continues as another one
        "failed": requests["failed"],
        "prompt_tokens": prompt_tokens,
        "cached": round(cached / prompt_tokens, 4) if prompt_tokens else 0.0,
        "output_tokens": account["output_tokens"],
        "gpu_seconds": round(sum(account["gpu_seconds"].values()), 3),
        "gpu_seconds_saved": round(account["gpu_seconds_saved"], 3),
    }


def _table(rows: Sequence[dict[str, Any]]) -> Table:
    columns = with_model(COLUMNS, rows)
    words = ("model", "tenant")
    table = Table(
        *(
            Column(name.replace("_", " "), overflow="fold", justify="left")
            if name in words
            else Column(name.replace("_", " "), justify="right")
            for name in columns
        )
    )
    for row in rows:
        shown = row | {"cached": f"{row['cached']:.1%}"}
        table.add_row(*(_cell(shown[name]) for name in columns))
    return table


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.1f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _print_csv(rows: Sequence[dict[str, Any]]) -> None:
    writer = csv.DictWriter(sys.stdout, CSV_COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
