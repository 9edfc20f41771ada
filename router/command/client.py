"""How the commands ask a running cluster."""

from collections.abc import Iterable, Sequence
from typing import Annotated, Any

import httpx
import typer

WAIT_S = 60.0
LOCAL = "http://127.0.0.1:8000"

Url = Annotated[str, typer.Option(help="Where the cluster listens.")]
Model = Annotated[
    str | None, typer.Option(help="Which model; to be said where the cluster serves several.")
]


def call(method: str, url: str, path: str, **body: Any) -> Any:
    """The answer as JSON; ends the command, with the server's words where it refuses."""
    try:
        answer = httpx.request(method, url.rstrip("/") + path, timeout=WAIT_S, **body)
        found = answer.json()
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        fail(nobody_there(url, error))
    if answer.is_error:
        fail(refusal(found) or f"{method} {path}: {answer.status_code} {answer.reason_phrase}")
    return found


def nobody_there(url: str, error: Exception) -> str:
    """What to say of a URL where no cluster answers."""
    return f"--url is {url!r}, where no kvroute answers ({error}); start one: kvroute serve"


def with_model(columns: Sequence[str], rows: Iterable[dict[str, Any]]) -> Sequence[str]:
    """The columns of a table, with the model where the rows are of several."""
    return ("model", *columns) if len({row["model"] for row in rows}) > 1 else columns


def fail(message: str) -> Any:
    typer.secho(message, fg="red", err=True)
    raise typer.Exit(1)


def refusal(found: Any) -> str | None:
    """What an error in OpenAI's shape says."""
    try:
        return str(found["error"]["message"])
    except (KeyError, TypeError):
        return None
