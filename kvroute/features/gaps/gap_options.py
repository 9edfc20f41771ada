"""The options of the limit of the time between tokens, which engines receive."""

from typing import Annotated

from pydantic import BaseModel, Field

from kvroute.settings.help import Option
from kvroute.settings.options.common import QUEUE

MAX_TPOT_MS = 60_000  # highest limit that operators or a request can choose


class GapOptions(BaseModel):
    """The options of the limit."""

    slo_tpot_ms: Annotated[
        int,
        Field(ge=0, le=MAX_TPOT_MS),
        Option(
            QUEUE,
            "While answers run, a step computes only as much of prompts as fits into this many "
            "milliseconds, which bounds the time between two tokens. First tokens come later. A "
            "request can then choose a limit of its own with x-kvroute-tpot-ms. 0: no limit.",
        ),
    ] = 0
    slo_ttft_ms: Annotated[
        int,
        Field(gt=0, le=3_600_000),
        Option(
            QUEUE,
            "With --slo-tpot-ms: steps may exceed it if a prompt would get its first token later "
            "than this many milliseconds after it has reached the replica.",
        ),
    ] = 1000
