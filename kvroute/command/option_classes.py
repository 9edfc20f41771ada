"""Commands whose options are the fields of a dataclass."""

import inspect
from collections.abc import Callable
from typing import Any, TypeVar, get_type_hints

T = TypeVar("T")


def with_options(run: Callable[[T], None], options: type[T]) -> Callable[..., None]:
    """Return a command for Typer: it has an option for each field of the class `options`.

    Args:
        run: Runs the command, with an object of this class. Its docstring is the text of --help.
        options: The class.
    """

    def command(**values: Any) -> None:
        run(options(**values))

    command.__doc__ = run.__doc__
    command.__annotations__ = get_type_hints(options, include_extras=True)
    command.__signature__ = inspect.signature(options)  # type: ignore[attr-defined]
    return command
