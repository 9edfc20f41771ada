"""JSON of the seats of sessions (admission/seats.py), as one router knows them."""

from typing import Any

from kvroute.router.admission.seats import Seats


def as_json(seats: Seats[Any], now_s: float) -> dict[str, Any]:
    """Return how many sessions are active, hold seats or wait for one, and the limits."""
    state = seats.state(now_s)
    return {
        "is_limited": state.is_limited,
        "most": state.most,
        "sessions": state.sessions,
        "tokens": state.tokens,
        "seats": state.seats,
        "seat_tokens": state.seat_tokens,
        "limit_tokens": state.limit_tokens,
        "waiting": state.waiting,
        "oldest_s": round(state.oldest_s, 3),
        "all_routers": {
            "waiting": state.all_waiting,
            "oldest_s": round(state.all_oldest_s, 3),
        },
    }
