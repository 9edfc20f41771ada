"""The command `kvroute batch`."""

import asyncio
import json
import shlex
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from itertools import combinations
from pathlib import Path
from typing import Annotated

import httpx
import typer
from rich.console import Console
from rich.status import Status

from kvroute.batch.lines import BadLinesError, Lines, open_lines
from kvroute.batch.order import Sorter
from kvroute.batch.results import Results, ResultsError
from kvroute.batch.run import RefusedKeyError, Runner, RunProgress
from kvroute.batch.window import Window
from kvroute.client import (
    FIND,
    GivenUrl,
    error_message,
    fail,
    find_url,
    key_headers,
    no_cluster,
)
from kvroute.command.help_page import HelpfulCommand, typer_app
from kvroute.command.own_cluster import NotStartedError, own_cluster
from kvroute.contract.priority import Priority
from kvroute.wording import plural

MAX_OPEN = 4096  # default upper bound of the open requests
CONNECT_S = 30.0  # seconds after which a connection attempt counts as failed
PRINT_INTERVAL_S = 10.0  # seconds between two lines of progress, if there is no terminal

RequestsFile = Annotated[
    Path,
    typer.Argument(
        metavar="FILE", help="Requests in OpenAI's batch format, one JSON object in each line."
    ),
]

batch = typer_app(no_args_is_help=True, help="Many requests from a file, in the best order.")


@batch.command(cls=HelpfulCommand)
def run(
    file: RequestsFile,
    output: Annotated[Path, typer.Option("--output", "-o", help="File for the answers.")],
    errors: Annotated[
        Path | None,
        typer.Option(help="File for failed lines.", show_default="OUTPUT.errors"),
    ] = None,
    priority: Annotated[
        Priority,
        typer.Option(
            help="Priority class of the requests. With batch, all other requests go first."
        ),
    ] = "default",
    keep_order: Annotated[
        bool, typer.Option("--keep-order", help="Send the lines in the order of the file.")
    ] = False,
    max_open: Annotated[
        int, typer.Option(min=1, help="Upper bound of the requests that are open at a time.")
    ] = MAX_OPEN,
    serve: Annotated[
        str | None,
        typer.Option(
            metavar="OPTIONS",
            help="Start a cluster with these options of kvroute serve for this batch, and stop it "
            "afterwards, such as --serve '--model Qwen/Qwen3-8B --replicas 4'.",
            show_default="use a running cluster",
        ),
    ] = None,
    url: GivenUrl = FIND,
) -> None:
    """Answer all lines of a file.

    Lines whose prompts begin alike are sent one after the other, so that their common beginning is
    computed once. Answers are written as they come, in the order in which they are ready. If the
    command was interrupted, run it again: it continues with the lines that have no answer yet.
    """
    if not output.name:
        fail(f"--output is {str(output)!r}; expected the path of a file")
    errors = errors or output.with_name(f"{output.name}.errors")
    _check_names(file, output, errors)
    lines, order = _read(file, keep_order=keep_order)
    with ExitStack() as running:
        running.enter_context(closing(lines))
        try:
            results = running.enter_context(closing(Results(output, errors, lines)))
        except ResultsError as error:
            fail(str(error))
        except OSError as error:
            fail(f"{error.filename} cannot be written ({error.strerror})")
        if not results.is_done.all():
            url = _answering(find_url(url)) if serve is None else _start(serve, running)
        headers = {"content-type": "application/json", "x-kvroute-priority": priority}
        progress = asyncio.run(
            _run(url, key_headers() | headers, lines, order, results, max_open=max_open)
        )
    _summarize(progress, results.failed + progress.failed, output, errors)


def _check_names(file: Path, output: Path, errors: Path) -> None:
    """End the command if two of the files are the same one."""
    named = {"FILE": file, "--output": output, "--errors": errors}
    for (first, path), (second, other) in combinations(named.items(), 2):
        if path.resolve() == other.resolve():
            fail(f"{first} and {second} are both {path}; name another file")


def _answering(url: str) -> str:
    """Return the URL, or end the command if no cluster answers there. One that starts does."""
    try:
        response = httpx.get(f"{url}/health", timeout=CONNECT_S, trust_env=False)
        if response.status_code == httpx.codes.NOT_FOUND:
            fail(no_cluster(url, "the response to GET /health is 404"))
    except httpx.TimeoutException:
        pass  # it is busy, and the lines are sent again until it answers
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        fail(no_cluster(url, error))
    return url


def _read(file: Path, *, keep_order: bool) -> tuple[Lines, Sequence[int]]:
    """Return the lines of a file, and the order in which to send them."""
    sorter = Sorter()
    try:
        if keep_order:
            lines = open_lines(file)
            return lines, range(len(lines))
        lines = open_lines(file, sorter.add)
    except OSError as error:
        fail(f"FILE is {str(file)!r}, which cannot be read ({error.strerror})")
    except BadLinesError as error:
        fail(f"{file} cannot be used:\n" + "\n".join(map(str, error.faults)))
    return lines, sorter.order()


def _start(options: str, running: ExitStack) -> str:
    try:
        arguments = shlex.split(options)
    except ValueError as error:
        fail(f"--serve is {options!r}, which is not a list of options ({error}); close the quote")
    with Status("starting the cluster", console=Console(stderr=True)):
        try:
            return running.enter_context(own_cluster(arguments))
        except NotStartedError as error:
            return str(fail(f"the cluster has not started:\n{error}"))


async def _run(
    url: str,
    headers: dict[str, str],
    lines: Lines,
    order: Sequence[int],
    results: Results,
    *,
    max_open: int,
) -> RunProgress:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    timeout = httpx.Timeout(None, connect=CONNECT_S)  # an answer may take any time
    async with httpx.AsyncClient(
        base_url=url, headers=headers, limits=limits, timeout=timeout, trust_env=False
    ) as client:
        remaining = [index for index in order if not results.is_done[index]]
        runner = Runner(
            client,
            lines.read,
            remaining,
            results,
            total=len(lines),
            window=Window(lambda: max_open),
            downloads=True,
        )
        with _Display(runner.progress) as display:
            try:
                await runner.run(display.update)
            except RefusedKeyError as error:
                fail(f"the cluster refuses the batch: {_message(str(error))}")
            except OSError as error:
                fail(f"the answers cannot be written ({error}); run the command again later")
        return runner.progress


def _message(body: str) -> str:
    """Return the message of an error response, or its whole body if it has another format."""
    try:
        return error_message(json.loads(body)) or body
    except ValueError:
        return body


class _Display:
    """Shows the progress: a line that changes on a terminal, else a line every few seconds."""

    def __init__(self, progress: RunProgress) -> None:
        self._first = progress.done
        self._start_s = self._printed_s = time.monotonic()
        self._console = Console(stderr=True)
        self._status = Status(describe(progress, 0.0, self._first), console=self._console)

    def __enter__(self) -> "_Display":
        if self._console.is_terminal:
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._status.stop()

    def update(self, progress: RunProgress) -> None:
        now_s = time.monotonic()
        if not self._console.is_terminal and now_s - self._printed_s <= PRINT_INTERVAL_S:
            return
        self._printed_s = now_s
        text = describe(progress, now_s - self._start_s, self._first)
        if self._console.is_terminal:
            self._status.update(text)
        else:
            print(text, file=sys.stderr, flush=True)


def describe(progress: RunProgress, elapsed_s: float, first: int) -> str:
    """Return a line about a batch that runs.

    Args:
        progress: how far the batch is.
        elapsed_s: seconds since the start of this run.
        first: lines that were answered before this run.
    """
    parts = [f"{progress.done:,} of {progress.total:,} lines"]
    answered = progress.done - first
    if progress.failed:
        parts.append(f"{progress.failed:,} failed")
    if answered and elapsed_s:
        usage = progress.usage
        tokens = usage.prompt_tokens + usage.answer_tokens
        parts.append(f"{tokens / elapsed_s:,.0f} tokens/s")
        if usage.prompt_tokens:
            cached = usage.cached_tokens / usage.prompt_tokens
            parts.append(f"{cached:.0%} of prompt tokens cached")
        left_s = elapsed_s / answered * (progress.total - progress.done)
        parts.append(f"{_duration(left_s)} left")
    if progress.refusal and not progress.open:
        refusal = _message(progress.refusal)
        parts.append(f"the cluster accepts no line at the moment ({refusal})")
    if progress.away:
        parts.append(f"the cluster does not answer ({progress.away})")
    return ", ".join(parts)


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}"


def _summarize(progress: RunProgress, failed: int, output: Path, errors: Path) -> None:
    text = f"{progress.done:,} of {progress.total:,} lines have a result; answers are in {output}"
    if failed:
        text += (
            f", and {plural(failed, 'failed line')} in {errors}. To send these lines again, delete "
            "this file and run the command again"
        )
    typer.echo(text)
    if failed:
        raise typer.Exit(1)
