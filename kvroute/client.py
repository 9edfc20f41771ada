"""HTTP calls from commands to a running cluster."""

import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer

from kvroute.local.running import KEY, URL, running_urls

WAIT_S = 60.0  # timeout of a call
LOCAL = "http://127.0.0.1:8000"  # address of a cluster with default options
FIND = ""  # default of --url: find_url() then looks for the cluster on this machine
TOKEN_FILE = "KVROUTE_METRICS_TOKEN_FILE"  # environment variable for --metrics-token-file


def find_url(url: str) -> str:
    """Return the URL of --url, else of the cluster on this machine, else the default URL.

    End the command if --url is not set and several clusters run on this machine.
    """
    urls = [url if "://" in url else f"http://{url}"] if url else running_urls()
    if len(urls) > 1:
        fail(
            f"several clusters run on this machine: {', '.join(urls)}; choose one with --url or "
            f"with the variable {URL}"
        )
    # Clients of OpenAI's API need the address with /v1, so it is often copied.
    return urls[0].rstrip("/").removesuffix("/v1") if urls else LOCAL


def _option(callback: Callable[[str], str] | None) -> Any:
    return typer.Option(
        envvar=URL,
        show_envvar=True,
        show_default="the cluster on this machine",
        callback=callback,
        help="The cluster's URL.",
    )


Url = Annotated[str, _option(find_url)]
GivenUrl = Annotated[str, _option(None)]  # for commands that may not need a cluster
Model = Annotated[
    str | None, typer.Option(help="Name of the model; required if the cluster serves several.")
]


def call(method: str, url: str, path: str, **body: Any) -> Any:
    """Send a request and return the response's JSON. If it fails, print why and end the command."""
    try:
        response = httpx.request(method, url + path, timeout=WAIT_S, headers=key_headers(), **body)
        content = response.json()
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        fail(no_cluster(url, error))
    if response.is_error:
        fail(
            error_message(content)
            or f"{method} {path}: {response.status_code} {response.reason_phrase}"
        )
    return content


def key_headers() -> dict[str, str]:
    """Return the header with the user's API key, if KEY is set."""
    key = os.environ.get(KEY, "").strip()
    if not key.isascii():
        fail(f"{KEY} is not an API key; set it to the output of `kvroute keys add`")
    return {"authorization": f"Bearer {key}"} if key else {}


def metrics_headers() -> dict[str, str]:
    """Return the header with the metrics token, if TOKEN_FILE is set."""
    if not (file := os.environ.get(TOKEN_FILE)):
        return {}
    from kvroute.process.metrics_port import NoMetricsError, read_token

    try:
        return {"authorization": f"Bearer {read_token(Path(file)).decode()}"}
    except NoMetricsError as error:
        return dict(fail(str(error)))


def no_cluster(url: str, error: Exception) -> str:
    """Return the error message for a URL without a cluster."""
    return (
        f"no kvroute answers at {url} ({error}); start one with kvroute serve, or name another "
        f"with --url or in the variable {URL}"
    )


def has_several_models(rows: Iterable[dict[str, Any]]) -> bool:
    """Return whether the rows of a table belong to more than one model."""
    return len({row["model"] for row in rows}) > 1


def fail(message: str) -> Any:
    """Print an error and end the command. On a terminal, break lines only between words."""
    if sys.stderr.isatty():
        columns = shutil.get_terminal_size().columns
        message = textwrap.fill(message, columns, break_long_words=False, break_on_hyphens=False)
    typer.secho(message, fg="red", err=True)
    raise typer.Exit(1)


def error_message(content: Any) -> str | None:
    """Return the message of an error response in OpenAI's format, or None for other responses."""
    try:
        message = str(content["error"]["message"])
    except (KeyError, TypeError):
        return None
    needs_key = content["error"].get("code") in ("invalid_api_key", "insufficient_role")
    return f"{message}; commands use the key in the variable {KEY}" if needs_key else message
