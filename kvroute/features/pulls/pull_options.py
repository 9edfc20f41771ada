"""The options of pulls, which routers and replicas receive."""

from typing import Annotated, Literal

from pydantic import BaseModel, Field

from kvroute.settings.help import Option
from kvroute.settings.options.common import CACHE


class PullOptions(BaseModel):
    """The options of pulls."""

    pull: Annotated[
        Literal["on", "off"],
        Option(
            CACHE,
            "on: replicas with --host-cache-gb copy blocks from each other's host memory where "
            "that is faster than computing them. Each of their ranks then needs another port of "
            "--replica-ports. It has only run on CPUs so far.",
        ),
    ] = "off"
    hand_over_s: Annotated[
        float,
        Field(ge=0, le=3600),
        Option(
            CACHE,
            "With --pull on: the most seconds for which other replicas copy cached blocks from a "
            "replica that is removed. 0: they copy none.",
        ),
    ] = 30.0
