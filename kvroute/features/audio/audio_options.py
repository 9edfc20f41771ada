"""The options of recordings, which routers and replicas receive."""

from typing import Annotated

from pydantic import BaseModel

from kvroute.settings.help import Option
from kvroute.settings.options.common import ENDPOINT, Positive


class AudioOptions(BaseModel):
    """The options of recordings."""

    max_audio_mb: Annotated[
        int,
        Positive,
        Option(ENDPOINT, "Maximum size of a recording for /v1/audio routes in MB."),
    ] = 25
