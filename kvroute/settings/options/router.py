"""The options that routers receive."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from kvroute.settings import parsers
from kvroute.settings.help import Option
from kvroute.settings.options.common import (
    ENDPOINT,
    LOGS,
    MODEL,
    QUEUE,
    SERVE_AND_ATTACH,
    CommonOptions,
    Positive,
)


class RouterOptions(CommonOptions):
    """The options that routers receive for a model, including the common ones."""

    max_body_mb: Annotated[int, Positive, Option(ENDPOINT, "Maximum request body in MB.")] = 16
    max_requests: Annotated[
        int,
        Positive,
        Option(QUEUE, "Maximum requests in one router at a time; further ones get a 429."),
    ] = 2000
    max_wait_s: Annotated[
        float,
        Field(ge=0, le=1e6),
        Option(
            QUEUE,
            "Maximum seconds that a request waits until a replica starts it. A request that would "
            "wait longer gets a 429 at once. Batch requests have no limit unless they set one. 0 "
            "removes the limit for all requests.",
        ),
    ] = 30.0
    keep_alive_s: Annotated[
        float,
        Field(ge=0, le=1e6),
        Option(
            ENDPOINT,
            "Seconds after which a stream without an event yet gets its headers and a comment, and "
            "then one comment after each such time, so that clients and proxies do not give up. 0 "
            "sends none.",
        ),
    ] = 10.0
    policy: Annotated[
        Literal["kvroute", "round-robin", "power-of-two", "least-loaded", "random"],
        Option(QUEUE, "Policy that chooses a replica. Only `kvroute` considers what is cached."),
    ] = "kvroute"
    escape_special_tokens: Annotated[
        bool | None,
        Option(
            MODEL,
            "Treat special tokens in clients' messages as plain text, so that a client cannot end "
            "a message and forge another role's. Prompts of /v1/completions are not changed.",
            example="1 or 0",
            default="on with --api-keys",
            flags=("--escape-special-tokens/--no-escape-special-tokens",),
            kind=bool,
        ),
    ] = None
    api_keys: Annotated[
        Path | None,
        AfterValidator(parsers.absolute),
        Option(
            ENDPOINT,
            "File of API keys; edit it with kvroute keys. Each key belongs to a tenant. Tenants "
            "do not share caches.",
            example="keys.json",
            default="no keys are needed",
            basic=SERVE_AND_ATTACH,
        ),
    ] = None
    allow_origin: Annotated[
        list[str],
        BeforeValidator(parsers.listed),
        AfterValidator(parsers.origins),
        Option(
            ENDPOINT,
            "Origin whose web pages may use the cluster from a browser. For several, repeat the "
            "option or separate them with commas. *: all web pages; use API keys in this case.",
            example="https://chat.example.com",
            default="only the cluster's own pages",
        ),
    ] = []  # noqa: RUF012  # pydantic copies the default
    request_log: Annotated[
        Path | None,
        AfterValidator(parsers.absolute),
        Option(
            LOGS,
            "Folder for request logs, which kvroute replay reads. Each router writes one file per "
            "model, with one line per request: lengths, times and block ids, without text.",
            example="requests",
            default="no log is written",
            basic=SERVE_AND_ATTACH,
        ),
    ] = None
    hang_timeout_s: Annotated[
        float,
        Field(ge=2),
        Option(
            QUEUE,
            "Seconds after which a replica is replaced if it has work but sends nothing.",
        ),
    ] = 5.0
