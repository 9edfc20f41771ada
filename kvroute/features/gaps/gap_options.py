"""The options of the limit of the time between tokens, which engines receive."""

from typing import Annotated

from pydantic import BaseModel, Field

from kvroute.settings.help import Option
from kvroute.settings.options.common import QUEUE


class GapOptions(BaseModel):
    """The options of the limit."""

    slo_tpot_ms: Annotated[
        int,
        Field(ge=0, le=60_000),
        Option(
            QUEUE,
            "While answers run, replicas compute only so much of other prompts that a step takes "
            "at most this many milliseconds; so that is the time between two tokens. First tokens "
            "come later. A request can choose its own limit with x-kvroute-tpot-ms. 0: no limit.",
        ),
    ] = 0
    slo_ttft_ms: Annotated[
        int,
        Field(gt=0, le=3_600_000),
        Option(
            QUEUE,
            "With --slo-tpot-ms: steps become longer than that as soon as a prompt would "
            "otherwise get its first token later than this many milliseconds after its arrival "
            "at the replica.",
        ),
    ] = 1500
