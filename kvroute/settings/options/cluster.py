"""The options of a cluster: those of its models, and those of the cluster itself."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from kvroute.settings import parsers
from kvroute.settings.help import Option
from kvroute.settings.options.common import (
    CLUSTER,
    ENDPOINT,
    LOGS,
    MODEL,
    SERVE_AND_ATTACH,
    NotNegative,
    Positive,
)
from kvroute.settings.options.model import ModelOptions


class Options(ModelOptions):
    """All options. The options that this class adds apply to the whole cluster."""

    models: Annotated[
        list[dict[str, Any]],
        BeforeValidator(parsers.from_json),
        Option(
            MODEL,
            "Several models as JSON, each with its own options.",
            example='[{"model": "Qwen/Qwen3-8B", "replicas": 4}, {"model": "Qwen/Qwen3-0.6B"}]',
            default="none",
            kind=str,
        ),
    ] = []  # noqa: RUF012  # pydantic copies the default
    routers: Annotated[int, Positive, Option(CLUSTER, "Number of router processes.")] = 1
    host: Annotated[
        str,
        Option(
            ENDPOINT,
            "Address to listen on. 0.0.0.0: all addresses of this machine.",
            basic=SERVE_AND_ATTACH,
        ),
    ] = "127.0.0.1"
    insecure: Annotated[
        bool,
        Option(
            ENDPOINT,
            "Without API keys, allow a --host that other machines can reach, and any Host header. "
            "Everybody who reaches the address can then use, watch and change the cluster.",
            example="1 or 0",
            flags=("--insecure",),
        ),
    ] = False
    port: Annotated[
        int, Field(ge=1, le=65535), Option(ENDPOINT, "Port to listen on.", basic=SERVE_AND_ATTACH)
    ] = 8000
    tls_cert: Annotated[
        Path | None,
        AfterValidator(parsers.absolute),
        Option(
            ENDPOINT,
            "PEM file of a certificate and its chain, for https. Under serve deploy, set "
            "KVROUTE_TLS_CERT and KVROUTE_TLS_KEY on the head node.",
            example="cert.pem",
            default="http",
        ),
    ] = None
    tls_key: Annotated[
        Path | None,
        AfterValidator(parsers.absolute),
        Option(ENDPOINT, "PEM file of the certificate's key.", example="key.pem", default="none"),
    ] = None
    drain_timeout_s: Annotated[
        float,
        NotNegative,
        Option(
            CLUSTER,
            "Seconds that a removed replica has to finish its requests. Requests that are not "
            "finished then continue on other replicas.",
        ),
    ] = 600.0
    idle_timeout_s: Annotated[
        float,
        Field(ge=1, le=86_400),
        Option(
            ENDPOINT,
            "Seconds after which an idle connection of a client is closed. A load balancer in "
            "front of the cluster needs a shorter idle timeout. Under serve deploy, set "
            "KVROUTE_IDLE_TIMEOUT_S on every node.",
        ),
    ] = 90.0
    drain_s: Annotated[
        float,
        NotNegative,
        Option(
            CLUSTER,
            "Seconds that running requests have to finish after Ctrl-C or SIGTERM stops kvroute "
            "serve. Requests that are not finished then end with an error.",
        ),
    ] = 30.0
    log_format: Annotated[
        Literal["text", "json"],
        Option(LOGS, "Format of routers' and replicas' logs. json: one object per line."),
    ] = "text"
    log_dir: Annotated[
        Path | None,
        AfterValidator(parsers.absolute),
        Option(
            LOGS,
            "Folder that keeps the logs of the last run after kvroute serve has stopped.",
            example="logs",
            default="~/.local/state/kvroute",
        ),
    ] = None
    state_dir: Annotated[
        Path | None,
        AfterValidator(parsers.absolute),
        Option(
            CLUSTER,
            "Folder that keeps, without --redis-url, what kvroute has to store until its next "
            "start: named prefixes, responses, batches and the usage of tenants.",
            example="state",
            default="none: a stop loses what is stored",
        ),
    ] = None
    start_timeout_s: Annotated[
        float, Field(gt=0), Option(CLUSTER, "Timeout in seconds for the start of the cluster.")
    ] = 600.0
