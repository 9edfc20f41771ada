"""`--help` of every command: at 80 columns nothing is cut, and no word is broken."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from kvroute.cli import app
from kvroute.replay.policies.names import POLICY_NAMES
from kvroute.replay.policies.production import POLICIES

WIDTH = 80
PAGES: dict[str, Any] = {}  # a command's words -> the command


def collect(command: Any, *words: str) -> Iterator[tuple[str, Any]]:
    yield " ".join(words), command
    for name, inner in getattr(command, "commands", {}).items():
        yield from collect(inner, *words, name)


PAGES.update(collect(typer.main.get_command(app)))


def help_page(words: str, width: int = WIDTH) -> str:
    command = [*words.split(), "--help"]
    result = CliRunner().invoke(app, command, env={"COLUMNS": str(width)})
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize("words", PAGES)
def test_a_page_fits_and_has_every_word_whole(words: str) -> None:
    page, command = help_page(words), PAGES[words]
    shown = set(page.split())
    assert max(map(len, page.splitlines())) <= WIDTH
    assert "…" not in page
    for parameter in command.params:
        names = {*parameter.opts, *parameter.secondary_opts}
        if parameter.param_type_name == "option":
            assert names <= set(re.findall(r"--?[\w-]+", page)), parameter.name
        assert set((parameter.help or "").split()) <= shown, parameter.name
    assert set((command.help or "").split()) <= shown


@pytest.mark.parametrize("words", PAGES)
def test_a_page_has_no_names_of_types(words: str) -> None:
    assert re.findall(r"<[^>]*>|\brange\]|\bx>=", help_page(words)) == []


def test_every_command_has_a_topic_and_the_first_is_serve() -> None:
    page = help_page("")
    assert "\nCommands:" not in page
    names = re.findall(r"^  (\w+)  ", page, re.MULTILINE)
    assert names[0] == "serve"
    assert {*names} == {*PAGES[""].commands}


def test_the_options_that_most_users_need_come_first() -> None:
    page = help_page("serve")
    topics = re.findall(r"^(\S.*):$", page, re.MULTILINE)
    assert topics[:3] == ["Model", "Replicas", "Endpoint"]
    assert topics[-1] == "Options"  # --help
    assert page.index("--host") < page.index("--port") < page.index("--max-body-mb")


def test_the_policies_of_a_replay_are_listed_as_they_are() -> None:
    assert [*POLICIES] == [*POLICY_NAMES]
    assert {*POLICY_NAMES} <= {*re.findall(r"[\w-]+", help_page("replay"))}


def test_the_shell_completes_commands_and_options() -> None:
    script = CliRunner().invoke(
        app, [], prog_name="kvroute", env={"_KVROUTE_COMPLETE": "source_bash"}
    )
    assert "complete -o default" in script.output
    variables = {
        "_KVROUTE_COMPLETE": "complete_bash",
        "COMP_WORDS": "kvroute st",
        "COMP_CWORD": "1",
    }
    found = CliRunner().invoke(app, [], prog_name="kvroute", env=variables)
    assert found.output.split() == ["status"]
