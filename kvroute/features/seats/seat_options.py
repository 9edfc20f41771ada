"""The options of seats, which routers receive."""

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, Field
from pydantic_core import PydanticCustomError

from kvroute.settings.help import Option
from kvroute.settings.options.common import QUEUE

MAX_SESSIONS = 1_000_000  # highest number that --max-sessions accepts


def session_limit(value: object) -> object:
    """Parse "auto", "off", or a number of sessions from 1 to MAX_SESSIONS."""
    if value in ("auto", "off"):
        return value
    text = str(value)
    if text.isdecimal() and 1 <= int(text[:10]) <= MAX_SESSIONS:
        return int(text)
    raise PydanticCustomError(
        "sessions", f"expected auto, off, or a number of sessions from 1 to {MAX_SESSIONS:,}"
    )


class SeatOptions(BaseModel):
    """The options of the limit of active sessions."""

    max_sessions: Annotated[
        Literal["auto", "off"] | int,
        BeforeValidator(session_limit),
        Option(
            QUEUE,
            "Maximum sessions that hold a seat, the right to send requests; others wait. auto: no "
            "limit until active sessions evict each other's blocks, then as many as fit in the "
            "caches. off: no limit.",
            example="auto, off or 100",
            kind=str,
        ),
    ] = "auto"
    # The default is 10 minutes, after which agents and the official API clients give up.
    max_seat_wait_s: Annotated[
        float,
        Field(ge=0, le=1e6),
        Option(
            QUEUE,
            "Maximum seconds that a request waits until its session gets a seat (--max-sessions). "
            "A request that would wait longer gets a 429 at once. 0: no limit.",
        ),
    ] = 600.0
