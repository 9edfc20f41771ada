"""The command `kvroute tenants`."""

import csv
import json
import sys
from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated, Any

import typer

from kvroute.client import FIND, Url, call
from kvroute.command.tables import Column, number, print_entries
from kvroute.router.placement.ledger import CACHED

CSV_COLUMNS = (
    *("model", "tenant", "requests", "prompt_tokens", "cached", "output_tokens"),
    *("gpu_seconds", "gpu_seconds_saved", "failed"),
)


class Format(StrEnum):
    """The formats of the output."""

    TABLE = "table"
    JSON = "json"
    CSV = "csv"


def tenants(
    since: Annotated[
        str | None,
        typer.Option(metavar="DATE", help="First day, in UTC (default: 29 days before the last)."),
    ] = None,
    until: Annotated[
        str | None, typer.Option(metavar="DATE", help="Last day (default: today).")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Only this model.")] = None,
    format: Annotated[Format, typer.Option(help="Output format.")] = Format.TABLE,  # noqa: A002
    url: Url = FIND,
) -> None:
    """Show each tenant's requests, tokens, and GPU seconds spent and saved."""
    filters = {"since": since, "until": until, "model": model}
    params = {name: value for name, value in filters.items() if value is not None}
    usage = call("GET", url, "/v1/cluster/tenants", params=params)
    rows = [_row(account) for account in usage["data"]]  # the largest usage comes first
    if format is Format.JSON:
        typer.echo(json.dumps(usage, indent=1))
    elif format is Format.CSV:
        _print_csv(rows)
    elif rows:
        _show(rows)
        typer.echo(f"{usage['since']} to {usage['until']}, in UTC")
    else:
        typer.echo(f"no tenant used anything from {usage['since']} to {usage['until']}, in UTC")


def _row(account: dict[str, Any]) -> dict[str, Any]:
    requests, tokens = account["requests"], account["prompt_tokens"]
    prompt_tokens = sum(tokens.values())
    cached = sum(tokens[cause] for cause in CACHED)
    return {
        "model": account["model"],
        "tenant": account["tenant"],
        # Failed requests are left out: most of them continue as another request, which is counted.
        "requests": sum(requests.values()) - requests["failed"],
        "failed": requests["failed"],
        "prompt_tokens": prompt_tokens,
        "cached": round(cached / prompt_tokens, 4) if prompt_tokens else 0.0,
        "output_tokens": account["output_tokens"],
        "gpu_seconds": round(sum(account["gpu_seconds"].values()), 3),
        "gpu_seconds_saved": round(account["gpu_seconds_saved"], 3),
    }


def _show(rows: Sequence[dict[str, Any]]) -> None:
    columns = [
        *(Column("tenant"), number("requests"), number("prompt\ntokens"), number("cached")),
        *(number("output\ntokens"), number("GPU\nseconds"), number("GPU seconds\nsaved")),
    ]
    print_entries(columns, rows, _cells)


def _cells(row: dict[str, Any]) -> list[str]:
    return [
        row["tenant"],
        f"{row['requests']:,}",
        f"{row['prompt_tokens']:,}",
        f"{row['cached']:.1%}",
        f"{row['output_tokens']:,}",
        f"{row['gpu_seconds']:,.1f}",
        f"{row['gpu_seconds_saved']:,.1f}",
    ]


def _print_csv(rows: Sequence[dict[str, Any]]) -> None:
    writer = csv.DictWriter(sys.stdout, CSV_COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
