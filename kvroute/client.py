"""HTTP calls from commands to a running cluster."""

import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import httpx
import typer

from kvroute.local.running import KEY, URL, running_urls

WAIT_S = 60.0  # timeout of a call
LOCAL = "http://127.0.0.1:8000"  # address of a cluster with default options
FIND = ""  # default of --url: find_url() then looks for the cluster on this machine
TOKEN_FILE = "KVROUTE_METRICS_TOKEN_FILE"  # environment variable for --metrics-token-file


# Fields of requests that have another name than the command's parameter.
PARAMETERS = {"completion_window": "window"}
# The parameters of the command that runs -> their names on the command line, such as `--since`.
_option_names: ContextVar[Mapping[str, str]] = ContextVar("option_names")


@contextmanager
def option_names(names: Mapping[str, str]) -> Iterator[None]:
    """Let the errors of the cluster's responses name the options of the command that runs.

    Args:
        names: the command's parameters, and their names on the command line.
    """
    token = _option_names.set(names)
    try:
        yield
    finally:
        _option_names.reset(token)


def find_url(url: str) -> str:
    """Return the URL of --url, else of the cluster on this machine, else the default URL.

    End the command if --url is not a URL, or if it is not set and several clusters run on this
    machine.
    """
    urls = [url if "://" in url else f"http://{url}"] if url else running_urls()
    if url and not _is_url(urls[0]):
        fail(
            f"--url (or the variable {URL}) is {url!r}; expected http://HOST:PORT or "
            "https://HOST:PORT"
        )
    if len(urls) > 1:
        fail(
            f"several clusters run on this machine: {', '.join(urls)}; choose one with --url or "
            f"with the variable {URL}"
        )
    # Clients of OpenAI's API need the address with /v1, so it is often copied.
    return urls[0].rstrip("/").removesuffix("/v1") if urls else LOCAL


def _is_url(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return (
            parts.scheme in ("http", "https")
            and bool(parts.hostname)
            and not re.search(r"[\s\x00-\x1f]", url)
            and parts.port != 0
        )
    except ValueError:  # the port is not a number, or too high
        return False


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
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        fail(no_cluster(url, error))
    return content_of(response, url)


def content_of(response: httpx.Response, url: str) -> Any:
    """Return the JSON of a response. If it is an error, print it and end the command.

    Args:
        response: the response.
        url: the cluster's URL, for the error if something else than kvroute has answered.
    """
    request = response.request
    seen = f"the response to {request.method} {request.url.path} is {response.status_code}"
    try:
        content = response.json()
    except ValueError:
        fail(no_cluster(url, f"{seen} {response.reason_phrase}, without JSON"))
    if not response.is_error:
        return content
    message = error_message(content)
    if message in (None, response.reason_phrase):
        fail(no_cluster(url, f"{seen} {response.reason_phrase}"))
    return fail(str(message))


def key_headers() -> dict[str, str]:
    """Return the header with the user's API key, if KEY is set."""
    key = os.environ.get(KEY, "").strip()
    if not (key.isascii() and key.isprintable()):
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


def no_cluster(url: str, error: Exception | str) -> str:
    """Return the error message for a URL without a cluster; `error` says why none was found."""
    return (
        f"no kvroute answers at {url} ({error}); start one with kvroute serve, or name another "
        f"with --url or in the variable {URL}"
    )


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
    message = _with_option_names(message)
    needs_key = content["error"].get("code") in ("invalid_api_key", "insufficient_role")
    return f"{message}; commands use the key in the variable {KEY}" if needs_key else message


def error_code(content: Any) -> str:
    """Return the code of an error response in OpenAI's format; empty for other responses."""
    try:
        return str(content["error"]["code"] or "")
    except (KeyError, TypeError):
        return ""


def _with_option_names(message: str) -> str:
    """Replace the names of fields, as in `since is ...`, by the options of the running command."""
    names = _option_names.get({})
    fields = {field: names[name] for field, name in PARAMETERS.items() if name in names}
    written = {**names, **fields}
    if not written:
        return message
    fields_there = "|".join(map(re.escape, written))
    return re.sub(
        rf"(^| and )({fields_there})(?= is )", lambda found: found[1] + written[found[2]], message
    )
