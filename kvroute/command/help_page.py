"""The text of `--help`: one section for each topic. No name is cut, and no word is broken.

Typer's own table gives each kind of flag a column and cuts the names that do not fit.
"""

import re
import textwrap
from collections.abc import Iterable
from typing import Any

import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup

OPTIONS = "Options"  # section of options and commands without a topic
TYPES = {  # Typer's name of a type -> word for a value of that type
    "<str>": "TEXT",
    "<list[str]>": "TEXT",
    "<int>": "N",
    "<int range>": "N",
    "<float>": "NUMBER",
    "<float range>": "NUMBER",
    "<path>": "PATH",
    "<FileText>": "FILE",
}

NAMES_WIDTH = 32  # columns for names; a longer name has a line of its own
GAP = 2  # columns between a name and its description

Row = tuple[str, str]  # an option or a command, and its description


class HelpfulCommand(TyperCommand):
    """A command with this module's help text."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        _write_parameters(self.get_params(ctx), ctx, formatter)


class HelpfulGroup(TyperGroup):
    """A group of commands with this module's help text."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        self.format_commands(ctx, formatter)
        _write_parameters(self.get_params(ctx), ctx, formatter)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        commands = [self.commands[name] for name in self.list_commands(ctx)]
        rows = [(_topic(command, "Commands"), _command(command)) for command in commands]
        _write_sections(rows, formatter)


def typer_app(**options: Any) -> typer.Typer:
    """Return a Typer application with this module's help text; see `add_command`."""
    return typer.Typer(
        cls=HelpfulGroup, rich_markup_mode=None, pretty_exceptions_enable=False, **options
    )


def _write_parameters(parameters: Iterable[Any], ctx: Any, formatter: Any) -> None:
    """Write the sections of arguments and options; options without a topic come last."""
    rows = [
        (_topic(each, "Arguments" if isinstance(each, TyperArgument) else OPTIONS), record)
        for each in parameters
        if (record := _parameter(each, ctx))
    ]
    _write_sections(sorted(rows, key=lambda row: row[0] == OPTIONS), formatter)


def _write_sections(rows: Iterable[tuple[str, Row]], formatter: Any) -> None:
    sections: dict[str, list[Row]] = {}
    for topic, row in rows:
        sections.setdefault(topic, []).append(row)
    for topic, members in sections.items():
        with formatter.section(topic):
            _write_rows(members, formatter)


def _write_rows(rows: Iterable[Row], formatter: Any) -> None:
    """Write names and descriptions in two columns; lines end between words only."""
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
        for left, right in zip(names, lines or [""], strict=True):
            formatter.write(f"{indent}{left:{column}}{right}".rstrip() + "\n")


def _topic(described: Any, default: str) -> str:
    return described.rich_help_panel or default


def _command(command: Any) -> Row:
    summary = (command.help or "").partition("\n\n")[0]
    return command.name, summary.replace("\n", " ")


def _parameter(parameter: Any, ctx: Any) -> Row | None:
    """Return the name and the description, or None for a hidden parameter."""
    record = parameter.get_help_record(ctx)
    if record is None:
        return None
    is_argument = isinstance(parameter, TyperArgument)
    name = parameter.display_name_raw if is_argument else re.sub(r"<[^>]+>", _value, record[0])
    return name, re.sub(r"\bx>=", "at least ", record[1])


def _value(name: re.Match[str]) -> str:
    """Return the word for a value; choices are shown as they are."""
    return TYPES.get(name[0], name[0].strip("<>"))
