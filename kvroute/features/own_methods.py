"""Finds out which objects have an implementation of their own of a method with an empty default.

So a method that nobody overrides costs nothing when it is called for all objects.
"""

from collections.abc import Callable, Iterable
from typing import Any, Concatenate, ParamSpec, TypeVar

T = TypeVar("T")
P = ParamSpec("P")
R = TypeVar("R")


def overriding(objects: Iterable[T], default: Callable[..., Any]) -> list[T]:
    """Return those objects whose class overrides a method.

    Args:
        objects: instances of the class that defines the method, in the order of the result.
        default: the method as that class defines it, which does nothing.
    """
    return [each for each in objects if getattr(type(each), default.__name__) is not default]


def own_methods(
    objects: Iterable[Any], default: Callable[Concatenate[Any, P], R]
) -> list[Callable[P, R]]:
    """Return the bound methods of those objects whose class overrides a method."""
    return [getattr(each, default.__name__) for each in overriding(objects, default)]
