"""Pages of lists, as OpenAI's API has them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from kvroute.router.api.errors import invalid, shown

T = TypeVar("T")


@dataclass(frozen=True)
class Page(Generic[T]):
    """A part of a list."""

    items: Sequence[T]
    has_more: bool  # whether items follow

    def as_object(self, data: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return the page in the format of OpenAI's API.

        Args:
            data: the page's items as objects.
        """
        return {
            "object": "list",
            "data": data,
            "first_id": data[0]["id"] if data else None,
            "last_id": data[-1]["id"] if data else None,
            "has_more": self.has_more,
        }


def in_order(items: Sequence[T], query: Mapping[str, str]) -> Sequence[T]:
    """Return items in the order that a request asks for: the newest first by default.

    Args:
        items: all items, the oldest first.
        query: the parameters of the request. `order` is optional.

    Raises:
        ApiError: the order is not valid.
    """
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise invalid("order", f"order is {shown(order)}; expected asc or desc")
    return items[::-1] if order == "desc" else items


def page_of(
    items: Sequence[T],
    query: Mapping[str, str],
    *,
    id_of: Callable[[T], str],
    default: int,
    most: int,
) -> Page[T]:
    """Return the items that a request asks for.

    Args:
        items: all items, in the order of the pages.
        query: the parameters of the request. `after` and `limit` are optional.
        id_of: returns the id of an item.
        default: number of items if there is no `limit`.
        most: the most items in a page.

    Raises:
        ApiError: a parameter is not valid.
    """
    after, limit = query.get("after"), _limit(query.get("limit", f"{default}"), most)
    first = 0
    if after is not None:
        positions = [position for position, item in enumerate(items) if id_of(item) == after]
        if not positions:
            raise invalid("after", f"after is {shown(after)}; expected the id of one of the items")
        first = positions[0] + 1
    return Page(items[first : first + limit], len(items) > first + limit)


def _limit(text: str, most: int) -> int:
    is_number = text.isascii() and text.isdecimal() and len(text) <= 9
    if not (is_number and 1 <= int(text) <= most):
        raise invalid("limit", f"limit is {shown(text)}; expected a number up to {most}")
    return int(text)
