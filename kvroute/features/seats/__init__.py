"""Seats: while the contexts of all sessions do not fit in the caches, only some may send requests.

A seat is the permission of a session to send requests (seats.py). README.md explains the parts.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

from kvroute.contract.error_codes import FeatureCode
from kvroute.features.feature import Feature, RefusalText, State

if TYPE_CHECKING:
    from pydantic import BaseModel

    from kvroute.doctor.checks import Check
    from kvroute.features.seats.router_seats import RouterSeats
    from kvroute.router.serving.router_base import RouterBase
    from kvroute.settings.needs import Need

NO_SEAT = FeatureCode("no_seat")  # the code of its error, and the reason of its refusals


class Seating(Feature):
    """The limit of active sessions."""

    name = "seats"
    codes = (NO_SEAT,)
    has_state = True
    refusals: ClassVar[Mapping[str, RefusalText]] = {
        NO_SEAT: RefusalText(
            metric="the wait of their session for a seat was above the limit, or predicted to be",
            finding="waited too long for a seat of their session",
            option="--max-seat-wait-s",
        )
    }

    def options(self) -> "type[BaseModel]":
        from kvroute.features.seats.seat_options import SeatOptions

        return SeatOptions

    def needs(self) -> "Sequence[Need]":
        from kvroute.settings.needs import Need

        return [
            Need(
                ("max_seat_wait_s",),
                lambda options: options.max_sessions != "off",
                "a limit of sessions: set --max-sessions to auto or to a number",
            )
        ]

    def router(self, base: "RouterBase") -> "RouterSeats | None":
        from kvroute.features.seats.router_seats import RouterSeats
        from kvroute.features.seats.seat_options import SeatOptions

        options = base.settings.of(self.name, SeatOptions)
        limit: Literal["auto", "off"] | int = options.max_sessions
        # All policies but kvroute ignore caches, so they get no limit by themselves.
        if limit == "off" or (limit == "auto" and base.settings.policy != "kvroute"):
            return None
        return RouterSeats(None if limit == "auto" else limit, max_wait_s=options.max_seat_wait_s)

    def replayed(self, policy: str = "") -> "RouterSeats":
        from kvroute.features.seats.router_seats import RouterSeats

        return RouterSeats()

    def lines(self, state: State) -> Iterable[tuple[str, str]]:
        from kvroute.features.seats.seat_checks import status_line

        return [("seats", status_line(state))]

    def checks(self, found: Sequence[State] | None) -> "Iterator[Check]":
        from kvroute.features.seats.seat_checks import seats

        return seats(found or ())
