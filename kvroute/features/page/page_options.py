"""The option of the live page, which routers receive."""

from typing import Annotated

from pydantic import BaseModel

from kvroute.settings.help import Option
from kvroute.settings.options.common import LOGS


class PageOptions(BaseModel):
    """Whether there is a live page."""

    ui: Annotated[
        bool,
        Option(
            LOGS,
            "Serve a live page at /ui with replicas, their caches, cache hits and routing "
            "decisions.",
            example="1 or 0",
            flags=("--ui/--no-ui",),
        ),
    ] = True
