"""The command `kvroute drain`."""

from typing import Annotated

import typer

from kvroute.client import fail


def drain(
    within: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            min=1,
            help="When this machine ends. Spot machines are announced 30 s (Azure, Google Cloud) "
            "or 120 s (AWS) before.",
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
