"""The command `kvroute explain`."""

import json
from collections.abc import Iterator
from typing import Annotated, Any, TextIO

import typer

from kvroute.blocks.tiers import SLOWER
from kvroute.client import FIND, Model, Url, call, fail
from kvroute.command.tables import (
    MIN_SHOWN_S,
    Column,
    number,
    print_sentence,
    print_table,
    prose,
    seconds,
)
from kvroute.features import TERMS as FEATURE_TERMS
from kvroute.wording import plural

EVICTED = {  # reason of an eviction -> its explanation for the user
    "ended": "their session had ended",
    "unlikely": "such conversations seldom continue",
    "usual": "ordinary eviction, or their replica was cleared or lost",
}
TERMS = {  # term of the cost of choosing a replica -> what this time is spent on
    "waiting": "prefill queued there",
    "reload": "copies from slower memory",
    "memory": "waiting for free space in the cache",
    "own": "computing what no replica has cached",
    "copy": "computing what another replica has cached",
    "setup": "loading the LoRA adapter",
    "rotation": "starting a conversation out of rotation",
    "decode": "slowing the answers that run there",
    "eviction": "computing again what its new blocks evict",
    **{name: text.label for name, text in FEATURE_TERMS.items()},
}

Facts = dict[str, Any]  # a receipt (the JSON that explains a placement), or a part of it


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
            help="Instead of PROMPT: a file with the JSON body of a request, such as a whole chat; "
            "- is the standard input."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")] = False,
    model: Model = None,
    url: Url = FIND,
) -> None:
    """Show to which replica a prompt would be sent now, and why; nothing is generated.

    The prompt goes to the replica with the lowest weighted cost. In it, computing what another
    replica has cached counts differently from computing what no replica has.
    """
    if (prompt is None) == (body is None):
        fail("set either PROMPT or --body FILE")
    request = _read(body) if body else _request(str(prompt), is_raw=raw)
    if model is not None:
        request["model"] = model
    for receipt in call("POST", url, "/v1/route", json=request)["receipts"]:
        if as_json:
            typer.echo(json.dumps(receipt))
        else:
            print_receipt(receipt)


def print_receipt(receipt: Facts) -> None:
    """Print where the prompt goes and why, all replicas, and in which costs the best two differ."""
    replicas = receipt["replicas"]
    for sentence in sentences(receipt):
        print_sentence(sentence)
    if replicas:
        typer.echo()
        print_table(*_replicas(replicas))
    if rows := _terms(replicas[:2]):
        typer.echo()
        columns = [prose("extra cost"), *(number(replica["id"]) for replica in replicas[:2])]
        print_table(columns, rows)


def _request(prompt: str, *, is_raw: bool) -> dict[str, Any]:
    return {"prompt": prompt} if is_raw else {"messages": [{"role": "user", "content": prompt}]}


def _read(file: TextIO) -> dict[str, Any]:
    try:
        return dict(json.load(file))
    except (ValueError, TypeError) as error:
        return dict(fail(f"--body {file.name}: {error}; expected a JSON object"))


def _replicas(replicas: list[Facts]) -> tuple[list[Column], list[list[str]]]:
    """Return the table of all replicas; leave out columns in which every value is 0."""
    all_columns = {
        number("cached\ntokens"): [f"{replica['hit_tokens']:,}" for replica in replicas],
        number("queued\nprefill"): [seconds(replica["backlog_s"]) for replica in replicas],
        number("prompt's\nprefill"): [seconds(replica["prefill_s"]) for replica in replicas],
        number("unanswered\nrequests"): [f"{replica['unanswered']:,}" for replica in replicas],
        number("weighted\ncost"): [seconds(replica["cost_s"] or 0.0) for replica in replicas],
    }
    columns = {column: cells for column, cells in all_columns.items() if {*cells} != {"0"}}
    ids = [replica["id"] for replica in replicas]
    rows = [[*row] for row in zip(ids, *columns.values(), strict=True)]
    return [Column("replica"), *columns], rows


def _terms(replicas: list[Facts]) -> list[list[str]]:
    """Return the rows of cost terms that differ between the best two replicas.

    Each cell has the difference to the smaller value of the row.
    """
    costs = [replica["terms_s"] for replica in replicas if replica["terms_s"]]
    if len(costs) < 2:
        return []
    rows = []
    for term, label in TERMS.items():
        pair = [cost.get(term, 0.0) for cost in costs]
        if max(pair) - min(pair) >= MIN_SHOWN_S:
            rows.append([label, *(seconds(cost_s - min(pair)) for cost_s in pair)])
    return rows


def sentences(receipt: Facts) -> list[str]:
    """Return sentences that say where the prompt goes, why, and what is known about its blocks."""
    tokens = f"The prompt has {plural(receipt['prompt_tokens'], 'token')}"
    blocks = plural(receipt["reusable_blocks"], "whole block")
    choice, reason = receipt["choice"], receipt["reason"]
    return [
        f"Goes to {choice}: {reason}." if choice else f"Goes nowhere: {reason}.",
        f"{tokens}. All but the last can be cached, in {blocks} of {receipt['block_size']} tokens.",
        *filter(None, [_reloaded(receipt["replicas"]), *_of_features(receipt["replicas"])]),
        *filter(None, [_evicted(receipt["evicted"])]),
        *filter(None, [_broken(receipt["broken"])]),
    ]


def _reloaded(replicas: list[Facts]) -> str:
    """Return a sentence about tokens that the chosen replica only has in slower memory, or ""."""
    choice = replicas[0] if replicas else {}
    tokens = {tier: choice.get(f"{tier.name}_tokens", 0) for tier in SLOWER}
    by_tier = ", ".join(
        f"{count} tokens in {tier.label}" for tier, count in tokens.items() if count
    )
    if not by_tier:
        return ""
    return f"{choice['id']} has {by_tier}; copying them takes {seconds(choice['reload_s'])}."


def _of_features(replicas: list[Facts]) -> Iterator[str]:
    """Yield sentences about what features do for this prompt on the chosen replica."""
    choice = replicas[0] if replicas else {}
    for name, text in FEATURE_TERMS.items():
        if took_s := choice.get(f"{name}_s"):
            yield text.chosen.format(
                id=choice["id"],
                source=choice[f"{name}_from"],
                tokens=choice.get("peer_tokens", 0),
                seconds=seconds(took_s),
            )


def _evicted(evicted: Facts | None) -> str:
    """Return a sentence about tokens that were cached earlier and no longer are, or ""."""
    if evicted is None:
        return ""
    return f"{evicted['tokens']:,} more tokens were cached earlier: {EVICTED[evicted['why']]}."


def _broken(broken: Facts | None) -> str:
    """Return a sentence about what has changed in the chat since an earlier turn, or ""."""
    if broken is None:
        return ""
    role, index = broken["message"]["role"], broken["message"]["index"]
    message = role if index is None else f"message {index}, {role}"
    before, after = broken["before"], broken["after"]
    return (
        f"The chat changed at token {broken['token']} ({message}): {before['tokens']} tokens "
        f"({before['hash']}) became {after['tokens']} ({after['hash']}), and {broken['tokens']} "
        "tokens after them are computed again."
    )
