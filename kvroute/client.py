"""The commands call a running cluster over HTTP."""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer

WAIT_S = 60.0
LOCAL = "http://127.0.0.1:8000"
TOKEN_FILE = "KVROUTE_METRICS_TOKEN_FILE"  # the setting --metrics-token-file
KEY = "KVROUTE_API_KEY"  # an environment variable: arguments can be seen by other users

Url = Annotated[str, typer.Option(help="The cluster's URL.")]
Model = Annotated[
    str | None, typer.Option(help="Name of the model; required if the cluster serves several.")
]


def call(method: str, url: str, path: str, **body: Any) -> Any:
    """The response as JSON. After an error it prints the server's message and ends the command."""
    try:
        response = httpx.request(
            method, url.rstrip("/") + path, timeout=WAIT_S, headers=key_headers(), **body
        )
        found = response.json()
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        fail(no_cluster(url, error))
    if response.is_error:
        fail(
            error_message(found)
            or f"{method} {path}: {response.status_code} {response.reason_phrase}"
        )
    return found


def key_headers() -> dict[str, str]:
    """The user's API key, if there is one."""
    key = os.environ.get(KEY, "").strip()
    if not key.isascii():
        fail(f"{KEY} has characters that no API key has; it is what `kvroute keys add` printed")
    return {"authorization": f"Bearer {key}"} if key else {}


def metrics_headers() -> dict[str, str]:
    """The token of the cluster's metrics, if TOKEN_FILE names its file."""
    if not (file := os.environ.get(TOKEN_FILE)):
        return {}
    from kvroute.process.metrics_port import NoMetricsError, read_token

    try:
        return {"authorization": f"Bearer {read_token(Path(file)).decode()}"}
    except NoMetricsError as error:
        return dict(fail(str(error)))


def no_cluster(url: str, error: Exception) -> str:
    """The error message for a URL without a cluster."""
    return f"--url is {url!r}, where no kvroute answers ({error}); start one: kvroute serve"


def with_model(columns: Sequence[str], rows: Iterable[dict[str, Any]]) -> Sequence[str]:
    """The columns of a table, plus the model if the rows belong to several."""
    return ("model", *columns) if len({row["model"] for row in rows}) > 1 else columns


def fail(message: str) -> Any:
    typer.secho(message, fg="red", err=True)
    raise typer.Exit(1)


def error_message(found: Any) -> str | None:
    """The message of an error in OpenAI's format."""
    try:
        message = str(found["error"]["message"])
    except (KeyError, TypeError):
        return None
    needs_key = found["error"].get("code") in ("invalid_api_key", "insufficient_role")
    return f"{message}; commands send the one in {KEY}" if needs_key else message
