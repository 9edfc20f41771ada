"""Requests of client libraries in tests: for the weather in a city, or for a booking."""

from typing import Literal

from pydantic import BaseModel

TIMEOUT_S = 120.0
QUESTION = "What is the weather in Oslo?"
City = Literal["Oslo", "Lima"]
CITIES = ("Oslo", "Lima")
ENOUGH = 120  # number of tokens that is enough for a tool call or a booking


class Booking(BaseModel):
    """The type of a structured answer."""

    city: City
    is_return: bool
