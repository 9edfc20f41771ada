"""Commands whose options are the fields of a dataclass.

A field with BASIC in its annotation is an option that most users need. `--help` shows only these,
and `--help-all` shows all options.
"""

import inspect
from collections.abc import Callable
from typing import Annotated, Any, TypeVar, get_args, get_type_hints

import typer

from kvroute.command.help_page import show_all

T = TypeVar("T")

BASIC = "basic"  # in the annotation of an option: --help shows it
HELP_ALL = "help_all"  # name of the parameter of --help-all


def with_options(run: Callable[[T], None], options: type[T]) -> Callable[..., None]:
    """Return a command for Typer: it has an option for each field of the class `options`.

    Args:
        run: Runs the command, with an object of this class. Its docstring is the text of --help.
        options: The class. If a class has a `topic`, its options are listed under this heading.
    """

    def command(**values: Any) -> None:
        values.pop(HELP_ALL)
        run(options(**values))

    hints = get_type_hints(options, include_extras=True)
    _set_topics(options)
    parameters = [*inspect.signature(options).parameters.values()]
    help_all = Annotated[
        bool,
        typer.Option(
            "--help-all",
            is_eager=True,
            expose_value=False,
            callback=show_all,
            help=f"Show all {len(parameters)} options and exit.",
        ),
    ]
    command.__doc__ = run.__doc__
    command.__annotations__ = {**hints, HELP_ALL: help_all}
    command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            *(each.replace(annotation=hints[each.name]) for each in parameters),
            inspect.Parameter(
                HELP_ALL, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=help_all
            ),
        ]
    )
    return command


def basic_options(options: type) -> frozenset[str]:
    """Return the names of the fields of an options class that have BASIC."""
    hints = get_type_hints(options, include_extras=True)
    return frozenset(name for name, hint in hints.items() if BASIC in get_args(hint)[1:])


def _set_topics(options: type) -> None:
    """Give each option the topic of the class that declares it."""
    for owner in options.__mro__:
        topic = vars(owner).get("topic")
        for hint in inspect.get_annotations(owner).values() if topic else ():
            for entry in get_args(hint)[1:]:
                if isinstance(entry, typer.models.OptionInfo):
                    entry.rich_help_panel = topic
