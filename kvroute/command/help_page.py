"""Formats what commands say about their options: the text of `--help`, and errors.

The text of `--help` has one section for each topic, without cut names or broken words. Typer's own
help has a table that cuts names if they do not fit into their column. A command with many options
shows only the basic ones there, and all with `--help-all`. Errors name an option or an argument as
users write it.
"""

import re
import textwrap
from collections import Counter
from collections.abc import Iterable
from typing import Any, ClassVar

import typer
from pydantic import ValidationError
from typer.core import TyperArgument, TyperCommand, TyperGroup

from kvroute.client import option_names
from kvroute.settings.help import expectation

OPTIONS = "Options"  # heading of the section for options without a topic
TYPES = {  # Typer's name of a type -> word that stands for a value in the help text
    "<str>": "TEXT",
    "<list[str]>": "TEXT",
    "<int>": "N",
    "<int range>": "N",
    "<float>": "NUMBER",
    "<float range>": "NUMBER",
    "<path>": "PATH",
    "<FileText>": "FILE",
}

ALIAS = re.compile(r"(?<=\w), --?[\w-]+")  # a further name of an option
SHOWS_ALL = "kvroute.help_all"  # key of a context's meta: whether --help-all is set

REMOVES = ("rm", "remove", "delete", "revoke")  # names of a command that removes something

NAMES_WIDTH = 32  # width of the column of names; a longer name gets a line of its own
GAP = 2  # spaces between the columns of names and of descriptions

Row = tuple[str, str]  # an option or a command, and its description


class HelpfulCommand(TyperCommand):
    """A command with this module's help text and errors."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return list(super().parse_args(ctx, args))
        except typer.BadParameter as error:
            if isinstance(error.__cause__, ValidationError) and error.param:
                raise typer.BadParameter(_wrong_value(error.param, error.__cause__), ctx) from None
            raise

    def invoke(self, ctx: Any) -> Any:
        written = {parameter.name: as_written(parameter) for parameter in self.params}
        with option_names(written):
            return super().invoke(ctx)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        _write_parameters(self.get_params(ctx), ctx, formatter)


class BriefCommand(HelpfulCommand):
    """A command with many options: `--help` shows its basic options, and `--help-all` all."""

    basic: ClassVar[frozenset[str]]  # names of the basic options and arguments

    def format_options(self, ctx: Any, formatter: Any) -> None:
        parameters = self.get_params(ctx)
        if ctx.meta.get(SHOWS_ALL):
            _write_parameters(parameters, ctx, formatter)
            return
        shown = {*self.basic, "help", "help_all"}
        basic = [each for each in parameters if each.name in shown]
        _write_parameters(basic, ctx, formatter, is_brief=True)
        others = Counter(
            _topic(each, OPTIONS)
            for each in parameters
            if each.name not in shown and each.get_help_record(ctx)
        )
        with formatter.section("More options, which --help-all shows"):
            for topic, number in others.items():
                formatter.write(f"  {topic} ({number})\n")


def brief_command(basic: frozenset[str]) -> type[BriefCommand]:
    """Return the class of a command with these basic options."""
    return type("BriefCommand", (BriefCommand,), {"basic": basic})


def show_all(ctx: typer.Context, is_set: bool) -> None:
    """Print all options and end the command; the callback of --help-all."""
    if is_set:
        ctx.meta[SHOWS_ALL] = True
        typer.echo(ctx.get_help())
        ctx.exit()


class HelpfulGroup(TyperGroup):
    """A group of commands with this module's help text.

    A command that removes something also has the other names in REMOVES, which are not shown.
    """

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name in REMOVES and cmd_name not in self.commands:
            cmd_name = next((name for name in self.commands if name in REMOVES), cmd_name)
        return super().get_command(ctx, cmd_name)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        self.format_commands(ctx, formatter)
        _write_parameters(self.get_params(ctx), ctx, formatter)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        commands = [self.commands[name] for name in self.list_commands(ctx)]
        rows = [(_topic(command, "Commands"), _command(command)) for command in commands]
        _write_sections(rows, formatter)


def typer_app(**options: Any) -> typer.Typer:
    """Return a Typer application with this module's help text.

    Its commands need `cls=HelpfulCommand` to have this help text, too.
    """
    return typer.Typer(
        cls=HelpfulGroup, rich_markup_mode=None, pretty_exceptions_enable=False, **options
    )


def as_written(parameter: Any) -> str:
    """Return the name of an option or an argument as users see it: `--ttl-s`, or `FILE`."""
    if isinstance(parameter, TyperArgument):
        return str(parameter.display_name_raw).strip("{}[]")
    return str(max(parameter.opts, key=len))


def _wrong_value(parameter: Any, error: ValidationError) -> str:
    """Return the error about a value of the wrong form, such as `--limit is '0'; expected ...`."""
    first = error.errors(include_url=False)[0]
    return f"{as_written(parameter)} is {first['input']!r}; {expectation(first['msg'])}"


def _write_parameters(
    parameters: Iterable[Any], ctx: Any, formatter: Any, *, is_brief: bool = False
) -> None:
    """Write the sections of arguments and options; options without a topic come last.

    Args:
        is_brief: Whether options with several names are listed under the first one only.
    """
    rows = [
        (_topic(parameter, _default_topic(parameter)), record)
        for parameter in parameters
        if (record := _parameter(parameter, ctx, is_brief=is_brief))
    ]
    _write_sections(sorted(rows, key=lambda row: row[0] == OPTIONS), formatter)


def _write_sections(rows: Iterable[tuple[str, Row]], formatter: Any) -> None:
    sections: dict[str, list[Row]] = {}
    for topic, row in rows:
        sections.setdefault(topic, []).append(row)
    for topic, topic_rows in sections.items():
        with formatter.section(topic):
            _write_rows(topic_rows, formatter)


def _write_rows(rows: Iterable[Row], formatter: Any) -> None:
    """Write names and descriptions in two columns; break lines only between words."""
    rows = list(rows)
    column = min(NAMES_WIDTH, max(len(name) for name, _ in rows) + GAP)
    indent = " " * formatter.current_indent
    for name, description in rows:
        lines = textwrap.wrap(
            " ".join(description.split()),
            formatter.width - formatter.current_indent - column,
            break_long_words=False,
            break_on_hyphens=False,
        )
        if len(name) + GAP > column:
            lines.insert(0, "")
        names = [name, *[""] * (len(lines) - 1)]
        for label, line in zip(names, lines or [""], strict=True):
            formatter.write(f"{indent}{label:{column}}{line}".rstrip() + "\n")


def _topic(item: Any, default: str) -> str:
    """Return the topic of a parameter or a command."""
    return item.rich_help_panel or default


def _default_topic(parameter: Any) -> str:
    return "Arguments" if isinstance(parameter, TyperArgument) else OPTIONS


def _command(command: Any) -> Row:
    summary = (command.help or "").partition("\n\n")[0]
    return command.name, summary.replace("\n", " ")


def _parameter(parameter: Any, ctx: Any, *, is_brief: bool) -> Row | None:
    """Return the row of a parameter, or None if the parameter is hidden."""
    record = parameter.get_help_record(ctx)
    if record is None:
        return None
    is_argument = isinstance(parameter, TyperArgument)
    name = parameter.display_name_raw if is_argument else re.sub(r"<[^>]+>", _value, record[0])
    if is_brief:
        name = ALIAS.sub("", name)
    described = re.sub(r"([\d.]+)<=x<=([\d.]+)", r"from \1 to \2", record[1])
    return name, re.sub(r"\bx>=", "at least ", described)


def _value(name: re.Match[str]) -> str:
    """Return the word for a value of an option; leave choices unchanged."""
    return TYPES.get(name[0], name[0].strip("<>"))
