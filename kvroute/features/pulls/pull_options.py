"""The option of hand-overs, which routers and replicas receive."""

from typing import Annotated

from pydantic import BaseModel, Field

from kvroute.settings.help import Option
from kvroute.settings.options.common import CACHE


class PullOptions(BaseModel):
    """The option of hand-overs. --pull is an option of engines."""

    hand_over_s: Annotated[
        float,
        Field(ge=0, le=3600),
        Option(
            CACHE,
            "With --pull on: the most seconds for which other replicas copy cached blocks from a "
            "replica that is removed. 0: they copy none.",
        ),
    ] = 30.0


class RouterPullOptions(PullOptions):
    """What routers receive."""

    is_on: bool = False  # whether replicas pull
