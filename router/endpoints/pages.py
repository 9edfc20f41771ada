"""Pages of lists, as OpenAI's API has them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from kvroute.router.api.errors import invalid, shown


class Identified(Protocol):
    """An item of a list."""

    @property
    def id(self) -> str: ...


I = TypeVar("I", bound=Identified)  # noqa: E741  # a type


@dataclass(frozen=True)
class Page(Generic[I]):
    """A part of a list."""

    items: Sequence[I]
    has_more: bool  # whether items follow

    def as_object(self, data: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return the page in the format of OpenAI's API, with the items as objects."""
        return {
            "object": "list",
            "data": data,
            "first_id": self.items[0].id if self.items else None,
            "last_id": self.items[-1].id if self.items else None,
            "has_more": self.has_more,
        }


def limit_of(text: str | None, *, default: int, most: int) -> int:
    """Parse the parameter `limit` of a request.

    Raises:
        ApiError: it is not valid.
    """
    if text is None:
        return default
    is_number = text.isascii() and text.isdecimal() and len(text) <= 9
    if not (is_number and 1 <= int(text) <= most):
        raise invalid("limit", f"limit is {shown(text)}; expected a number from 1 to {most}")
    return int(text)


def page_of(items: Sequence[I], after: str | None, limit: int) -> Page[I]:
    """Return the items that follow the one with the id `after`, at most `limit`.

    Raises:
        ApiError: there is no such item.
    """
    first = 0
    if after is not None:
        positions = [position for position, item in enumerate(items) if item.id == after]
        if not positions:
            raise invalid("after", f"after is {shown(after)}; expected the id of one of the items")
        first = positions[0] + 1
    return Page(items[first : first + limit], len(items) > first + limit)
