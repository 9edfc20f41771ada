"""The command `kvroute adapters`."""

import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from kvroute.client import (
    FIND,
    Model,
    Url,
    call,
    content_of,
    fail,
    key_headers,
    no_cluster,
)
from kvroute.command.help_page import HelpfulCommand, typer_app
from kvroute.command.tables import Column, number, print_entries, print_sentence
from kvroute.wording import plural

POLL_S = 0.3  # seconds between two queries of the adapters' state
WARM_TIMEOUT_S = 300.0  # seconds that the command waits for all replicas to load an adapter
# Seconds that the cluster has to answer: a replica loads the adapter to check it, and a removal
# waits for running requests.
ANSWER_S = 330.0

Name = Annotated[
    str,
    typer.Argument(metavar="NAME", help="Name of the adapter, which requests send as model."),
]
Tenant = Annotated[
    str, typer.Option(help="The tenant to which the adapter belongs (default: it is for all).")
]

adapters = typer_app(
    no_args_is_help=True,
    help="LoRA adapters that are added and removed while a cluster runs. The cluster needs "
    "--lora-root.",
)


@adapters.command(cls=HelpfulCommand)
def add(
    name: Name,
    folder: Annotated[
        str,
        typer.Argument(
            metavar="FOLDER",
            help="The adapter's folder below --lora-root, in PEFT's format. Every machine needs it "
            "at the same path.",
        ),
    ],
    warm: Annotated[
        bool,
        typer.Option("--warm", help="Load the adapter on all replicas now, and wait for that."),
    ] = False,
    replace: Annotated[
        bool, typer.Option("--replace", help="Replace an adapter that has this name.")
    ] = False,
    tenant: Tenant = "",
    model: Model = None,
    url: Url = FIND,
) -> None:
    """Add an adapter for the whole cluster. One replica loads it first, to check it."""
    body = {
        "lora_name": name,
        "lora_path": _path_to_send(folder),
        "load_inplace": replace,
        "warm": warm,
    }
    _post(url, "/v1/load_lora_adapter", body | _owner(tenant, model))
    if warm:
        loaded = _until_warm(url, name, tenant, model)
        print_sentence(f"{name}: added, and loaded on {plural(loaded, 'replica')}")
        return
    print_sentence(f"{name}: added; replicas load it when it is first asked for")


@adapters.command(name="list", cls=HelpfulCommand)
def list_(model: Model = None, url: Url = FIND) -> None:
    """Show the adapters that were added, and how many replicas have them in memory."""
    added = _all(url, model)
    if not added:
        typer.echo("no adapter was added; add one with kvroute adapters add NAME FOLDER")
        return
    columns = [
        *(Column("adapter"), Column("tenant"), Column("state"), number("rank")),
        *(number("loaded on\nreplicas"), Column("added"), Column("folder")),
    ]
    print_entries(columns, added, _row)


@adapters.command(cls=HelpfulCommand)
def remove(name: Name, tenant: Tenant = "", model: Model = None, url: Url = FIND) -> None:
    """Remove an adapter when its running requests have ended. It gets no new ones."""
    response = _post(url, "/v1/unload_lora_adapter", {"lora_name": name} | _owner(tenant, model))
    print_sentence(f"{name}: removed" if response.status_code == 200 else response.text)


def _row(adapter: dict[str, Any]) -> list[str]:
    added = datetime.fromtimestamp(adapter["created"], UTC)
    return [
        adapter["name"],
        adapter["tenant"] or "all",
        adapter["state"],
        f"{adapter['rank']}",
        f"{len(adapter['loaded_on'])}",
        f"{added:%Y-%m-%d %H:%M}",
        adapter["path"],
    ]


def _path_to_send(folder: str) -> str:
    """Return the path of a folder, for the cluster: absolute if it is found from here."""
    path = Path(folder).expanduser()
    return str(path.absolute()) if path.is_dir() else folder


def _owner(tenant: str, model: str | None) -> dict[str, Any]:
    return {"tenant": tenant, "model": model}


def _all(url: str, model: str | None) -> list[dict[str, Any]]:
    params = {"model": model} if model else {}
    return list(call("GET", url, "/v1/adapters", params=params)["data"])


def _until_warm(url: str, name: str, tenant: str, model: str | None) -> int:
    """Wait until all replicas have loaded the adapter; return their number."""
    deadline = time.monotonic() + WARM_TIMEOUT_S
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("waiting for replicas", total=None)
        while True:
            found = [
                adapter
                for adapter in _all(url, model)
                if (adapter["name"], adapter["tenant"] or "") == (name, tenant)
                and adapter["state"] == "ready"
            ]
            if not found:
                fail(f"{name} was removed while replicas loaded it")
            loaded, replicas = len(found[0]["loaded_on"]), found[0]["replicas"]
            if replicas and loaded >= replicas:
                return loaded
            if time.monotonic() >= deadline:
                fail(
                    f"{name}: added, and loaded on {loaded} of {replicas} replicas after "
                    f"{WARM_TIMEOUT_S:g} s; the replicas' logs say why"
                )
            progress.update(task, description=f"loaded on {loaded} of {replicas} replicas")
            time.sleep(POLL_S)


def _post(url: str, path: str, body: dict[str, Any]) -> httpx.Response:
    """Send a request whose response is a text; end the command if it fails."""
    sent = {name: value for name, value in body.items() if value not in (None, "")}
    try:
        response = httpx.post(url + path, json=sent, headers=key_headers(), timeout=ANSWER_S)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        fail(no_cluster(url, error))
    if response.is_error:
        content_of(response, url)  # prints the error, and ends the command
    return response
