"""The commands `kvroute batch submit, list, show, results, cancel`: batches inside a cluster."""

import re
import time
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import httpx
import typer
from rich.console import Console
from rich.status import Status

from kvroute.client import FIND, Url, call, content_of, fail, key_headers, no_cluster
from kvroute.command.batch_command import RequestsFile
from kvroute.command.help_page import HelpfulCommand, typer_app
from kvroute.command.tables import Column, number, print_lines, print_table
from kvroute.wording import plural

FINAL = ("completed", "failed", "expired", "cancelled")  # statuses of batches that have ended
POLL_S = 1.0  # seconds between two requests for the status of a batch
SHOWN_FAULTS = 10  # how many faults of an input file are shown
ID = re.compile(r"[\w-]+")  # the form of a batch's id
TIMEOUT = httpx.Timeout(60.0, write=600.0)


def _path(id_: str) -> str:
    """Return the part of a URL for a batch's id, or end the command if it cannot be an id."""
    if not ID.fullmatch(id_):
        fail(f"BATCH is {id_[:80]!r}; expected the id of a batch. kvroute batch list shows them")
    return quote(id_)


commands = typer_app()  # are added to those of `kvroute batch`

Id = Annotated[
    str, typer.Argument(metavar="BATCH", help="The batch's id, as kvroute batch list shows it.")
]


@commands.command(cls=HelpfulCommand)
def submit(
    file: RequestsFile,
    endpoint: Annotated[
        str, typer.Option(help="The `url` that all lines have.")
    ] = "/v1/chat/completions",
    window: Annotated[
        str, typer.Option(help="Time after which the batch expires, such as 90m, 24h or 7d.")
    ] = "24h",
    wait: Annotated[
        bool, typer.Option("--wait", help="Show the progress until the batch has ended.")
    ] = False,
    url: Url = FIND,
) -> None:
    """Upload a file, and let the cluster answer its lines in the background."""
    uploaded = _upload(file, url)
    body = {"input_file_id": uploaded["id"], "endpoint": endpoint, "completion_window": window}
    created = call("POST", url, "/v1/batches", json=body)
    typer.echo(created["id"])
    if wait:
        _wait(created["id"], url)


@commands.command(name="list", cls=HelpfulCommand)
def list_(
    limit: Annotated[int, typer.Option(min=1, max=100, help="How many batches are shown.")] = 20,
    url: Url = FIND,
) -> None:
    """Show the batches in the cluster, the newest first."""
    batches = call("GET", url, "/v1/batches", params={"limit": limit})["data"]
    if not batches:
        typer.echo("there are no batches; start one with kvroute batch submit")
        return
    columns = [
        *(Column("batch"), Column("status"), number("lines"), number("done"), number("failed")),
        *(number("tokens"), number("cached"), Column("created")),
    ]
    print_table(columns, [_row(found) for found in batches])


@commands.command(cls=HelpfulCommand)
def show(id: Id, url: Url = FIND) -> None:  # noqa: A002
    """Show a batch."""
    found = call("GET", url, f"/v1/batches/{_path(id)}")
    counts = found["request_counts"]
    lines = [
        ("status", found["status"]),
        ("lines", _counted(counts)),
        ("tokens", _tokens(found["usage"])),
        ("input file", found["input_file_id"]),
        ("output file", found["output_file_id"] or "none yet"),
        ("error file", found["error_file_id"] or "none"),
        ("created", _time(found["created_at"])),
        ("expires", _time(found["expires_at"])),
    ]
    print_lines(lines)
    for fault in (found["errors"] or {"data": []})["data"][:SHOWN_FAULTS]:
        line = "file" if fault["line"] is None else f"line {fault['line']}"
        typer.echo(f"{line}: {fault['message']}")
    _say_why_lines_failed(found)


@commands.command(cls=HelpfulCommand)
def results(
    id: Id,  # noqa: A002
    output: Annotated[Path, typer.Option("--output", "-o", help="File for the answers.")],
    errors: Annotated[
        bool, typer.Option("--errors", help="Download the failed lines instead of the answers.")
    ] = False,
    url: Url = FIND,
) -> None:
    """Download the answers of a batch: all of them, or those so far if it still runs."""
    found = call("GET", url, f"/v1/batches/{_path(id)}")
    file = found["error_file_id" if errors else "output_file_id"]
    if file is None:
        kind = "failed lines" if errors else "answers"
        fail(f"the batch has no {kind}; its status is {found['status']}")
    path = f"/v1/files/{file}/content"
    try:
        with httpx.stream("GET", url + path, headers=key_headers(), timeout=TIMEOUT) as response:
            if response.is_error:
                response.read()
                content_of(response, url)
            with output.open("wb") as written:
                for chunk in response.iter_bytes():
                    written.write(chunk)
    except httpx.HTTPError as error:
        fail(no_cluster(url, error))
    except OSError as error:
        fail(f"--output is {str(output)!r}, which cannot be written ({error.strerror})")
    typer.echo(f"{output}: {_counted(found['request_counts'])}; the batch is {found['status']}")
    if not errors:
        _say_why_lines_failed(found)


@commands.command(cls=HelpfulCommand)
def cancel(id: Id, url: Url = FIND) -> None:  # noqa: A002
    """Cancel a batch. Its answers so far are kept."""
    found = call("POST", url, f"/v1/batches/{_path(id)}/cancel")
    typer.echo(f"{id}: {found['status']}")


def _upload(file: Path, url: str) -> Any:
    try:
        with file.open("rb") as content, Status("uploading", console=Console(stderr=True)):
            response = httpx.post(
                f"{url}/v1/files",
                data={"purpose": "batch"},
                files={"file": (file.name, content)},
                headers=key_headers(),
                timeout=TIMEOUT,
            )
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        fail(no_cluster(url, error))
    except OSError as error:
        fail(f"FILE is {str(file)!r}, which cannot be read ({error.strerror})")
    return content_of(response, url)


def _say_why_lines_failed(found: dict[str, Any]) -> None:
    """Say how to find out why lines of a batch have failed, if some have."""
    if found["request_counts"]["failed"]:
        command = f"kvroute batch results {found['id']} --errors -o errors.jsonl"
        typer.echo(f"the failed lines, and why they failed: {command}")


def _wait(id_: str, url: str) -> None:
    """Show the progress of a batch until it has ended. The exit status is 1 if it has failed."""
    with Status("validating", console=Console(stderr=True)) as shown:
        while True:
            found = call("GET", url, f"/v1/batches/{id_}")
            shown.update(f"{found['status']}: {_counted(found['request_counts'])}")
            if found["status"] in FINAL:
                break
            time.sleep(POLL_S)
    show(id_, url)
    if found["status"] != "completed" or found["request_counts"]["failed"]:
        raise typer.Exit(1)


def _row(found: dict[str, Any]) -> list[str]:
    counts, usage = found["request_counts"], found["usage"]
    return [
        found["id"],
        found["status"],
        f"{counts['total']:,}",
        f"{counts['completed']:,}",
        f"{counts['failed']:,}",
        f"{usage['total_tokens']:,}",
        _cached(usage),
        _time(found["created_at"]),
    ]


def _counted(counts: dict[str, int]) -> str:
    results = counts["completed"] + counts["failed"]
    verb = "has" if counts["total"] == 1 else "have"
    text = f"{results:,} of {plural(counts['total'], 'line')} {verb} a result"
    return f"{text}, {counts['failed']:,} of them failed" if counts["failed"] else text


def _tokens(usage: dict[str, Any]) -> str:
    return (
        f"{usage['input_tokens']:,} of prompts ({_cached(usage)} cached), "
        f"{usage['output_tokens']:,} of answers"
    )


def _cached(usage: dict[str, Any]) -> str:
    prompt = usage["input_tokens"]
    return f"{usage['input_tokens_details']['cached_tokens'] / prompt:.0%}" if prompt else "0%"


def _time(seconds: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
