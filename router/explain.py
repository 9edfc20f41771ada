"""`kvroute explain`: where a prompt would go now, and why."""

import json
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from router.client import LOCAL, Url, call

COLUMNS = ("hit_tokens", "backlog_s", "prefill_s", "unanswered", "cost_s")


def explain(
    prompt: Annotated[str, typer.Argument(help="The prompt's text: a user's message.")],
    raw: Annotated[
        bool, typer.Option("--raw", help="As /v1/completions takes it, without a chat template.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="For scripts.")] = False,
    url: Url = LOCAL,
) -> None:
    """Show where a prompt would go now, and why; nothing is generated."""
    body = {"prompt": prompt} if raw else {"messages": [{"role": "user", "content": prompt}]}
    (receipt,) = call("POST", url, "/v1/route", json=body)["receipts"]
    if as_json:
        typer.echo(json.dumps(receipt))
        return
    console = Console()
    console.print(_table(receipt))
    console.print(_summary(receipt))


def _table(receipt: dict[str, Any]) -> Table:
    terms = list(receipt["replicas"][0]["terms_s"] or ()) if receipt["replicas"] else []
    table = Table("replica", *COLUMNS, *terms)
    for replica in receipt["replicas"]:
        cells = [replica[column] for column in COLUMNS]
        cells += [replica["terms_s"][term] for term in terms]
        table.add_row(replica["id"], *("" if cell is None else f"{cell:g}" for cell in cells))
    return table


def _summary(receipt: dict[str, Any]) -> str:
    return (
        f"{receipt['prompt_tokens']} tokens, {receipt['reusable_blocks']} reusable blocks of "
        f"{receipt['block_size']}; the most that a replica holds: {receipt['best_hit_tokens']} "
        f"tokens\n{receipt['choice']}: {receipt['reason']}"
    )
