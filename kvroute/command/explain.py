"""The command `kvroute explain`."""

import json
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from kvroute.client import LOCAL, Model, Url, call

COLUMNS = ("hit_tokens", "backlog_s", "prefill_s", "unanswered", "cost_s")


def explain(
    prompt: Annotated[str, typer.Argument(help="The prompt's text: a user's message.")],
    raw: Annotated[
        bool, typer.Option("--raw", help="As in /v1/completions, without a chat template.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")] = False,
    model: Model = None,
    url: Url = LOCAL,
) -> None:
    """Show where a prompt would go now, and why; nothing is generated."""
    body = {"prompt": prompt} if raw else {"messages": [{"role": "user", "content": prompt}]}
    (receipt,) = call("POST", url, "/v1/route", json={**body, "model": model})["receipts"]
    if as_json:
        typer.echo(json.dumps(receipt))
        return
    console = Console()
    console.print(_replicas(receipt["replicas"]))
    console.print(_terms(receipt["replicas"][:2]))
    console.print(_summary(receipt), soft_wrap=True)


def _replicas(replicas: list[dict[str, Any]]) -> Table:
    table = Table("replica", *COLUMNS)
    for replica in replicas:
        table.add_row(replica["id"], *(_number(replica[column]) for column in COLUMNS))
    return table


def _terms(replicas: list[dict[str, Any]]) -> Table:
    """The cost terms of the chosen replica and the second best; empty without costs."""
    table = Table("cost in seconds", *(replica["id"] for replica in replicas))
    costs = [replica["terms_s"] or {} for replica in replicas]
    for term in costs[0] if costs else ():
        table.add_row(term, *(_number(cost[term]) for cost in costs))
    return table


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:g}"


def _summary(receipt: dict[str, Any]) -> str:
    return (
        f"{receipt['prompt_tokens']} tokens, {receipt['reusable_blocks']} reusable blocks of "
        f"{receipt['block_size']}; the most that a replica holds: {receipt['best_hit_tokens']} "
        f"tokens\n{receipt['choice']}: {receipt['reason']}"
    )
