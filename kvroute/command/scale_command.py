"""The commands `kvroute scale` and `kvroute drain`, which change the replicas of a cluster."""

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from kvroute.client import FIND, Model, Url, call, fail


def scale(
    replicas: Annotated[
        int, typer.Argument(metavar="REPLICAS", help="The new number of replicas.")
    ],
    model: Model = None,
    url: Url = FIND,
) -> None:
    """Add replicas to a running cluster, or remove some. No request is lost."""
    from kvroute.controller.ray_connection import UnreachableError
    from kvroute.controller.replica_count import ScaleError
    from kvroute.controller.replica_count import scale as scale_to
    from kvroute.local.progress import StartProgress

    if replicas < 1:
        fail(
            f"REPLICAS is {replicas}; expected 1 or more. To stop all replicas, stop kvroute serve"
        )
    try:
        cluster = call("GET", url, "/v1/cluster")
        scale_to(
            replicas,
            _scaled_model(model, url),
            cluster["ray_address"],
            StartProgress(),
            is_attached=has_servers(cluster),
        )
    except (ScaleError, UnreachableError) as error:
        fail(str(error))
    except KeyboardInterrupt:
        fail("stopped waiting; the cluster continues to scale")


def has_servers(cluster: Mapping[str, Any]) -> bool:
    """Return whether a cluster, as GET /v1/cluster describes it, has attached servers."""
    return bool(cluster["servers"]) or any(each.get("server") for each in cluster["replicas"])


def _scaled_model(model: str | None, url: str) -> str | None:
    """Return the model whose replicas to scale, or None if the cluster serves only one model."""
    cards = call("GET", url, "/v1/models")["data"]
    served = [card["id"] for card in cards if card["parent"] is None]  # adapters have a parent
    if len(served) > 1 and model is None:
        fail(f"the cluster serves several models; set --model to one of {', '.join(served)}")
    if model not in (None, *served):
        fail(f"--model is {model!r}; expected one of {', '.join(served)}")
    return model if len(served) > 1 else None


def drain(
    within: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            min=1,
            help="Seconds until this machine ends. Spot machines get 30 s of notice (Azure, "
            "Google Cloud) or 120 s (AWS).",
        ),
    ] = 100,
) -> None:
    """Move this machine's replicas to other machines, before it goes away. No request is lost.

    Run it on the machine that goes away, as the user who started the cluster there. Other replicas
    copy the blocks of its conversations if the cluster has --pull on.
    """
    from kvroute.controller.drain import DrainError
    from kvroute.controller.drain import drain as drain_machine
    from kvroute.controller.ray_connection import UnreachableError
    from kvroute.local.progress import StartProgress

    try:
        drain_machine(within, StartProgress())
    except (DrainError, UnreachableError) as error:
        fail(str(error))
    except KeyboardInterrupt:
        fail("stopped waiting; Ray continues to empty this machine")
