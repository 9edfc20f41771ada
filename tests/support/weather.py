"""What client libraries ask a cluster for in tests: the weather in a city, or a booking."""

from typing import Literal

from pydantic import BaseModel

TIMEOUT_S = 120.0
QUESTION = "What is the weather in Oslo?"
City = Literal["Oslo", "Lima"]
CITIES = ("Oslo", "Lima")
ENOUGH = 120  # tokens for a tool call or a booking, spaces included


class Booking(BaseModel):
    """A structured answer, which clients ask for instead of text."""

    city: City
    is_return: bool
