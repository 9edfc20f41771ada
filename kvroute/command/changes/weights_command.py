"""The command `kvroute weights`."""

import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any

import typer

from kvroute.client import FIND, Model, Url, call, fail, path_to_send
from kvroute.command.help_page import HelpfulCommand, typer_app
from kvroute.command.tables import Column, print_lines, print_sentence, print_table, prose
from kvroute.local.progress import Progress
from kvroute.weights.version import number_in
from kvroute.wording import plural

State = Mapping[str, Any]  # the weights of one model, as GET /v1/weights returns them

POLL_S = 0.5  # seconds between two queries of the weights' state
BEGIN_S = 120.0  # timeout of the call that begins an update: a replica checks the files first

weights = typer_app(
    no_args_is_help=True,
    help="The weights of a model, which can be replaced while a cluster runs. The cluster needs "
    "--weights-root.",
)


@weights.command(cls=HelpfulCommand)
def show(
    model: Annotated[str | None, typer.Option(help="Only this model.")] = None, url: Url = FIND
) -> None:
    """Show which weights the cluster has, and how far each replica is.

    For example: kvroute weights show --model base
    """
    for i, state in enumerate(_states(url, model)):
        print_lines([*_lines(state)], with_gap=i > 0)
        typer.echo()
        rows = [
            [replica["id"], _name(replica["version"]), _progress(replica, state)]
            for replica in state["replicas"]
        ]
        print_table((Column("replica"), Column("weights"), prose("progress")), rows)


@weights.command(cls=HelpfulCommand)
def update(
    source: Annotated[
        str,
        typer.Argument(
            metavar="FOLDER",
            help="Folder with safetensors files, below --weights-root. Every machine needs it.",
        ),
    ],
    version: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Name for the weights (default: the folder's name)."),
    ] = None,
    at_once: Annotated[
        int,
        typer.Option(
            help="How many replicas may load at the same time; the others serve meanwhile.",
        ),
    ] = 1,
    wait: Annotated[
        bool, typer.Option("--wait/--no-wait", help="Wait until all replicas have the weights.")
    ] = True,
    model: Model = None,
    url: Url = FIND,
) -> None:
    """Load other weights on all replicas. No request is lost.

    One replica checks the files before the update begins. The exit code is 1 if the weights cannot
    be loaded; the error says why.

    For example: kvroute weights update step-1200 --at-once 2
    """
    fields = {"source": path_to_send(source), "version": version, "model": model}
    body = {name: value for name, value in fields.items() if value is not None}
    progress = Progress()
    progress.step("a replica checks the files")
    begun = call(
        "POST",
        url,
        "/v1/weights",
        within_s=BEGIN_S,
        json={**body, "at_once": at_once, "wait": False},
    )
    if not wait:
        print_sentence(
            f"{begun['version']}: the update has begun; kvroute weights show says how far it is"
        )
        return
    try:
        replicas = _until_loaded(begun, url, progress)
    except KeyboardInterrupt:
        fail("stopped waiting; the update goes on")
    print_sentence(f"{begun['version']}: loaded by {plural(replicas, 'replica')}")


def _states(url: str, model: str | None) -> list[State]:
    params = {"model": model} if model else {}
    return list(call("GET", url, "/v1/weights", params=params)["data"])


def _until_loaded(begun: State, url: str, progress: Progress) -> int:
    """Wait until all replicas have the weights of an update; return the number of replicas."""
    shown = ""
    with progress.waiting("a replica that loads the weights") as show_wait:
        while True:
            (state,) = _states(url, begun["model"])
            if problem := _problem(begun, state):
                fail(problem)
            if (state["key"], state["state"]) == (begun["key"], "ready"):
                return len(state["replicas"])
            loaded = _loaded(state, begun["key"])
            if loaded != shown:
                progress.step(loaded)
                shown = loaded
            show_wait(", ".join(_waits(state, begun["key"])) or "the routers")
            time.sleep(POLL_S)


def _problem(begun: State, state: State) -> str:
    """Return why an update has failed; empty: it goes on, or all replicas have its weights.

    Args:
        begun: the state of the weights when the update began.
        state: the state now, at the router that has answered. It may be older than `begun`.
    """
    name, key, failed = begun["version"], begun["key"], state["failed"]
    if failed and failed["key"] == key:
        return f"{name}: {failed['problem']}. The old weights go on serving"
    if number_in(state["key"]) > number_in(key):
        return f"{name}: another update has replaced these weights by {_name(state['version'])}"
    if state["key"] != key:
        return ""
    behind = [replica for replica in state["replicas"] if replica["key"] != key]
    if not behind or not all(replica["problem"] for replica in behind):
        return ""
    return (
        f"{name}: {_loaded(state, key)}; replica {behind[0]['id']} cannot load it, and tries "
        f"again: {behind[0]['problem']}"
    )


def _loaded(state: State, key: str) -> str:
    replicas: Sequence[State] = state["replicas"]
    loaded = sum(replica["key"] == key for replica in replicas)
    return f"loaded by {loaded} of {plural(len(replicas), 'replica')}"


def _waits(state: State, key: str) -> Iterator[str]:
    """Yield what each replica without the weights does."""
    for replica in state["replicas"]:
        if replica["key"] != key:
            yield f"{replica['id']} ({_progress(replica, state)})"


def _lines(state: State) -> Iterator[tuple[str, str]]:
    yield "model", state["model"]
    yield "weights", _name(state["version"])
    if state["key"]:
        yield "folder", state["source"]
        yield "key", state["key"]
        yield "updated", _time(state["created"])
    yield "state", f"{state['state']}: {_loaded(state, state['key'])}"
    if failed := state["failed"]:
        yield (
            "FAILED",
            f"{failed['version']} in {failed['source']}, on {_time(failed['created'])}: "
            f"{failed['problem']}",
        )


def _progress(replica: State, state: State) -> str:
    """Return what a replica does until it has the weights of the model."""
    if replica["problem"]:
        return f"cannot load {_name(state['version'])}, and tries again: {replica['problem']}"
    if replica["key"] is None:
        return "finishes its requests, or loads"
    return "has them" if replica["key"] == state["key"] else "waits for its turn"


def _name(version: str | None) -> str:
    """Return the name of weights, as in the table; None: the replica does not say."""
    return "?" if version is None else version or "of the start"


def _time(created: int) -> str:
    return f"{datetime.fromtimestamp(created, UTC):%Y-%m-%d %H:%M} UTC"
