"""The command `kvroute explain`."""

import json
from typing import Annotated, Any, TextIO

import typer
from rich.console import Console
from rich.table import Table

from kvroute.blocks.tiers import SLOWER
from kvroute.client import FIND, Model, Url, call, fail

EVICTED = {  # reason of an eviction -> its description
    "ended": "their session had ended",
    "unlikely": "such conversations seldom continue",
    "usual": "ordinary eviction, or their replica was cleared or lost",
}
COLUMNS = ("hit_tokens", "backlog_s", "prefill_s", "unanswered", "cost_s")


def explain(
    prompt: Annotated[
        str | None,
        typer.Argument(metavar="PROMPT", help="The prompt's text: a user's message."),
    ] = None,
    raw: Annotated[
        bool,
        typer.Option("--raw", help="Send the text as in /v1/completions, without a chat template."),
    ] = False,
    body: Annotated[
        typer.FileText | None,
        typer.Option(
            help="A file with the JSON body of a request, such as a whole chat, instead of the "
            "text; - is the standard input."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")] = False,
    model: Model = None,
    url: Url = FIND,
) -> None:
    """Show which replica a prompt would go to now, and why; nothing is generated."""
    if (prompt is None) == (body is None):
        fail("write either a prompt or --body with a file")
    request = _read(body) if body else _request(str(prompt), is_raw=raw)
    if model is not None:
        request["model"] = model
    for receipt in call("POST", url, "/v1/route", json=request)["receipts"]:
        if as_json:
            typer.echo(json.dumps(receipt))
        else:
            _show(receipt)


def _show(receipt: dict[str, Any]) -> None:
    console = Console()
    console.print(_replicas(receipt["replicas"]))
    console.print(_terms(receipt["replicas"][:2]))
    console.print(_summary(receipt), soft_wrap=True)


def _request(prompt: str, *, is_raw: bool) -> dict[str, Any]:
    return {"prompt": prompt} if is_raw else {"messages": [{"role": "user", "content": prompt}]}


def _read(file: TextIO) -> dict[str, Any]:
    try:
        return dict(json.load(file))
    except (ValueError, TypeError) as error:
        return dict(fail(f"--body {file.name}: {error}; expected a JSON object"))


def _replicas(replicas: list[dict[str, Any]]) -> Table:
    table = Table("replica", *COLUMNS)
    for replica in replicas:
        table.add_row(replica["id"], *(_number(replica[column]) for column in COLUMNS))
    return table


def _terms(replicas: list[dict[str, Any]]) -> Table:
    """Return the cost terms of the chosen replica and the second best; empty without costs."""
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
        f"{receipt['block_size']}; longest cached prefix: {receipt['best_hit_tokens']} "
        f"tokens\n{receipt['choice']}: {receipt['reason']}{_reloaded(receipt['replicas'])}"
        f"{_evicted(receipt['evicted'])}{_broken(receipt['broken'])}"
    )


def _reloaded(replicas: list[dict[str, Any]]) -> str:
    """Return a line about blocks that the chosen replica has in slower tiers only, or ""."""
    choice = replicas[0] if replicas else {}
    tokens = {tier: choice.get(f"{tier.name}_tokens", 0) for tier in SLOWER}
    held = ", ".join(f"{count} tokens in {tier.label}" for tier, count in tokens.items() if count)
    return f"\n{held}, reload {choice['reload_s']:.3g} s" if held else ""


def _evicted(evicted: dict[str, Any] | None) -> str:
    """Return a line about tokens that were cached earlier and are not now, or ""."""
    if evicted is None:
        return ""
    return f"\n{evicted['tokens']} more tokens were cached earlier: {EVICTED[evicted['why']]}"


def _broken(broken: dict[str, Any] | None) -> str:
    """Return a line about what changed in the chat since its earlier turn, or ""."""
    if broken is None:
        return ""
    role, index = broken["message"]["role"], broken["message"]["index"]
    message = role if index is None else f"message {index}, {role}"
    before, after = broken["before"], broken["after"]
    return (
        f"\nthe chat changed at token {broken['token']} ({message}): {before['tokens']} tokens "
        f"({before['hash']}) became {after['tokens']} ({after['hash']}), and {broken['tokens']} "
        "tokens after them are computed again"
    )
