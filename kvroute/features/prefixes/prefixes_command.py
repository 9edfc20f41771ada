"""The command `kvroute prefixes`."""

import json
import math
import time
from typing import Annotated, Any, TextIO
from urllib.parse import quote

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from kvroute.client import FIND, Model, Url, call, fail
from kvroute.command.help_page import HelpfulCommand, typer_app
from kvroute.command.tables import Column, number, print_entries, print_sentence
from kvroute.wording import plural

# A prefix is warm on a replica that has all of it cached.
POLL_S = 0.3  # seconds between two queries of the prefix's state
WARM_TIMEOUT_S = 600.0  # seconds that the command waits for a prefix to become warm

Id = Annotated[
    str,
    typer.Argument(
        metavar="ID", help="Name of the prefix, which requests send as task_id or prefix_id."
    ),
]

prefixes = typer_app(
    no_args_is_help=True,
    help="Named prefixes: texts that a running cluster keeps cached (warm) for the prompts that "
    "begin with them.",
)


@prefixes.command(cls=HelpfulCommand)
def add(
    id: Id,  # noqa: A002
    file: Annotated[
        typer.FileText | None,
        typer.Argument(
            metavar="FILE", help="File with the prefix's text; - is the standard input."
        ),
    ] = None,
    prompt: Annotated[
        str | None, typer.Option(help="The prefix's text, instead of a file.")
    ] = None,
    messages: Annotated[
        bool, typer.Option("--messages", help="The text is a JSON list of chat messages.")
    ] = False,
    replicas: Annotated[
        str, typer.Option(help="How many replicas keep the prefix cached: a number, or all.")
    ] = "all",
    ttl_s: Annotated[
        float | None,
        typer.Option(help="Seconds after which the prefix is dropped (default: never)."),
    ] = None,
    pinned: Annotated[
        bool,
        typer.Option("--pinned/--unpinned", help="Whether the prefix is protected from eviction."),
    ] = True,
    host: Annotated[
        bool,
        typer.Option(
            "--host", help="Pin it in host memory (--host-cache-gb) instead of GPU memory."
        ),
    ] = False,
    shared: Annotated[
        bool, typer.Option("--shared", help="Let all tenants use the prefix and its cached blocks.")
    ] = False,
    wait: Annotated[
        bool, typer.Option("--wait/--no-wait", help="Wait until these replicas have it cached.")
    ] = True,
    model: Model = None,
    url: Url = FIND,
) -> None:
    """Declare a prefix, or a new version of it, and wait until replicas have it cached."""
    if (file is None) == (prompt is None):
        raise typer.BadParameter("set either FILE or --prompt")
    text = _text(prompt, file)
    if ttl_s is not None and not 0 < ttl_s < math.inf:
        raise typer.BadParameter(f"--ttl-s is {ttl_s:g}; expected seconds, more than 0")
    if host and not pinned:
        raise typer.BadParameter("--host pins the prefix, and --unpinned does not; leave one out")
    declaration = {
        "id": id,
        "model": model,
        **({"messages": _json(text)} if messages else {"prompt": text}),
        "replicas": int(replicas) if replicas.isdecimal() else replicas,
        "ttl_s": ttl_s,
        "pinned": "host" if host else pinned,
        "shared": shared,
    }
    prefix = _call("POST", url, json=declaration)
    if wait:
        prefix = _until_warm(prefix, url, model)
    print_sentence(
        f"{id}: version {prefix['version']}, {plural(prefix['tokens'], 'token')} "
        f"({plural(prefix['full_blocks'], 'full block')}), warm on {_warm(prefix)} replicas"
    )
    if replicas.isdecimal() and int(replicas) > (found := len(prefix["assigned_to"])):
        print_sentence(
            f"WARNING: --replicas is {replicas}, and the model has {plural(found, 'replica')}; "
            "replicas that start later get the prefix, too"
        )
    if warning := prefix.get("warning"):
        print_sentence(f"WARNING: {warning}")


def _text(prompt: str | None, file: TextIO | None) -> str:
    """Return the text of the prefix, or end the command if it is empty."""
    try:
        text = prompt if file is None else file.read()
    except UnicodeDecodeError as error:
        raise typer.BadParameter(f"FILE is not text in UTF-8 ({error.reason})") from None
    if not text:
        name = "--prompt" if file is None else f"FILE {file.name}"
        raise typer.BadParameter(f"{name} is empty; expected the text of the prefix")
    return text


@prefixes.command(name="list", cls=HelpfulCommand)
def list_(model: Model = None, url: Url = FIND) -> None:
    """Show the declared prefixes, and how many replicas have them cached (warm)."""
    declared = _call("GET", url, model=model)["data"]
    if not declared:
        typer.echo("no prefix is declared; add one with kvroute prefixes add")
        return
    columns = [
        *(Column("prefix"), number("version"), number("tokens"), Column("warm on\nreplicas")),
        *(Column("pinned"), Column("shared"), number("requests"), number("tokens\nsaved")),
    ]
    print_entries(columns, declared, _row)


def _row(prefix: dict[str, Any]) -> list[str]:
    pinned = {True: "yes", False: "no"}.get(prefix["pinned"], f"in {prefix['pinned']} memory")
    return [
        prefix["id"],
        f"{prefix['version']}",
        f"{prefix['tokens']:,}",
        _warm(prefix),
        pinned,
        "yes" if prefix["shared"] else "no",
        f"{prefix['hits']:,}",
        f"{prefix['tokens_saved']:,}",
    ]


@prefixes.command(cls=HelpfulCommand)
def rm(id: Id, model: Model = None, url: Url = FIND) -> None:  # noqa: A002
    """Drop a prefix, so that replicas no longer keep it cached."""
    if not id:
        fail("ID is ''; expected the name of a prefix. kvroute prefixes list shows them")
    _call("DELETE", url, id, model)
    typer.echo(f"{id}: dropped")


def _until_warm(prefix: dict[str, Any], url: str, model: str | None) -> dict[str, Any]:
    """Wait until the prefix is warm on all assigned replicas, and return its state."""
    deadline = time.monotonic() + WARM_TIMEOUT_S
    columns = (TextColumn("warming"), BarColumn(), TextColumn("{task.description}"))
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True)) as progress:
        task = progress.add_task("waiting for replicas", total=None)
        while not prefix["assigned_to"] or len(prefix["warm_on"]) < len(prefix["assigned_to"]):
            if time.monotonic() >= deadline:
                fail(
                    f"warm on {_warm(prefix)} replicas after {WARM_TIMEOUT_S:g} s; see the "
                    "replicas' logs"
                )
            time.sleep(POLL_S)
            prefix = _call("GET", url, prefix["id"], model)
            total = (prefix["tokens"] - prefix["partial_tokens"]) * len(prefix["assigned_to"])
            computed = prefix.get("computed_tokens", 0)
            progress.update(
                task,
                description=f"{computed:,} of {total:,} tokens, on {_warm(prefix)} replicas",
                completed=computed,
                total=total,
            )
    return prefix


def _warm(prefix: dict[str, Any]) -> str:
    return f"{len(prefix['warm_on'])} of {len(prefix['assigned_to'])}"


def _call(method: str, url: str, id_: str = "", model: str | None = None, **body: Any) -> Any:
    path = f"/v1/prefixes/{quote(id_, safe='')}" if id_ else "/v1/prefixes"
    return call(method, url, path, params={"model": model} if model else {}, **body)


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise typer.BadParameter(
            f'the text is not JSON ({error}); expected [{{"role": "system", "content": "..."}}]'
        ) from None
