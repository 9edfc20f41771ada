"""Finds out which objects have an implementation of their own of a method with an empty default."""

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

C = TypeVar("C", bound=Callable[..., Any])


def own_methods(objects: Iterable[object], default: C) -> list[Any]:
    """Return the bound methods of those objects whose class overrides a method.

    So a method that nobody overrides costs nothing when it is called for all objects.

    Args:
        objects: instances of the class that defines the method, in the order of the result.
        default: the method as that class defines it, which does nothing.
    """
    name = default.__name__
    return [getattr(each, name) for each in objects if getattr(type(each), name) is not default]
