"""`--help` of every command: at 80 columns nothing is cut, and no word is broken."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from kvroute.cli import app, main
from kvroute.replay.policies.names import POLICY_NAMES
from kvroute.replay.policies.production import POLICIES
from kvroute.settings.help import Option, option
from kvroute.settings.options.common import GROUPS, SERVE_AND_ATTACH
from kvroute.settings.serve import OPTIONS

WIDTH = 80
PAGES: dict[str, Any] = {}  # a command's words -> the command


def collect(command: Any, *words: str) -> Iterator[tuple[str, Any]]:
    yield " ".join(words), command
    for name, inner in getattr(command, "commands", {}).items():
        yield from collect(inner, *words, name)


PAGES.update(collect(typer.main.get_command(app)))


def help_page(words: str, option: str = "--help") -> str:
    command = [*words.split(), option]
    result = CliRunner().invoke(app, command, env={"COLUMNS": str(WIDTH)})
    assert result.exit_code == 0, result.output
    return result.output


BRIEF = ("serve", "attach", "replay")  # commands with --help-all


def whole_page(words: str) -> str:
    return help_page(words, "--help-all" if words in BRIEF else "--help")


def flags_on(page: str) -> list[str]:
    """Return the options that the page describes, each by its first flag."""
    return re.findall(r"^  (--[\w-]+)", page, re.MULTILINE)


@pytest.mark.parametrize("words", PAGES)
def test_a_page_fits_and_has_every_word_whole(words: str) -> None:
    page, command = whole_page(words), PAGES[words]
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
    assert re.findall(r"<[^>]*>|\brange\]|\bx>=", whole_page(words)) == []


def test_every_command_has_a_topic_and_the_first_is_serve() -> None:
    page = help_page("")
    assert "\nCommands:" not in page
    names = re.findall(r"^  (\w+)  ", page, re.MULTILINE)
    assert names[0] == "serve"
    assert {*names} == {*PAGES[""].commands}


@pytest.mark.parametrize("words", BRIEF)
def test_help_shows_the_basic_options_and_counts_the_others_by_topic(words: str) -> None:
    page, whole = help_page(words), help_page(words, "--help-all")
    shown = flags_on(page)
    assert max(map(len, page.splitlines())) <= WIDTH
    assert len(page.splitlines()) < 80
    assert 10 <= len(shown) <= 16  # with --help and --help-all
    assert {*shown} <= {*flags_on(whole)}
    assert not [flag for flag in shown if flag.startswith("--simulated")]
    counted = dict(re.findall(r"^  (.+) \((\d+)\)$", page, re.MULTILINE))
    assert len(shown) + sum(map(int, counted.values())) == len(flags_on(whole))
    assert {*counted} <= {*re.findall(r"^(\S.*):$", whole, re.MULTILINE)}


def test_each_option_belongs_to_exactly_one_group() -> None:
    for name, field in OPTIONS.items():
        (description,) = [entry for entry in field.metadata if isinstance(entry, Option)]
        assert description.group in GROUPS, name
        assert {*description.basic} <= {*SERVE_AND_ATTACH}, name
    flags = flags_on(help_page("serve", "--help-all"))
    assert len(flags) == len({*flags}) == len(OPTIONS) + 2  # and --help-all and --help


def test_aliases_of_other_systems_are_only_in_the_page_of_all_options() -> None:
    aliases = {env for field in OPTIONS.values() for env in option(field).env}
    further = {flag for name, field in OPTIONS.items() for flag in option(field).flags[1:]}
    assert {"REUSE_CACHE", "--tensor-parallel-size"} <= aliases | further
    page = set(re.findall(r"[\w-]+", help_page("serve")))
    assert not page & (aliases | further)


def test_the_groups_of_serve_are_in_their_order() -> None:
    page = help_page("serve", "--help-all")
    topics = re.findall(r"^(\S.*):$", page, re.MULTILINE)
    assert topics == [*GROUPS, "Options"]
    assert page.index("--host") < page.index("--port") < page.index("--max-body-mb")


def test_a_wrong_option_has_a_close_one_as_advice() -> None:
    result = CliRunner().invoke(app, ["serve", "--simulated-block", "5"])
    assert "--simulated-blocks" in result.output


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


@pytest.mark.parametrize("group", ["prefixes", "adapters", "keys"])
def test_a_command_that_removes_something_has_every_usual_name(group: str) -> None:
    pages = {
        help_page(f"{group} {name}").split("[OPTIONS]")[1] for name in ("rm", "remove", "delete")
    }
    assert len(pages) == 1
    listed = re.findall(r"^  (\w+)", help_page(group), re.MULTILINE)
    assert len({"rm", "remove", "delete", "revoke"} & {*listed}) == 1


def test_a_group_without_a_command_that_removes_something_has_no_such_name() -> None:
    result = CliRunner().invoke(app, ["batch", "rm"])
    assert "No such command 'rm'" in result.output


def test_an_error_names_the_command_and_not_the_program_that_runs_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a cluster that another command starts: `python -c PROGRAM serve`."""
    monkeypatch.setattr("sys.argv", ["-c", "serve", "--replcas", "3"])
    with pytest.raises(SystemExit):
        main()
    assert "Usage: kvroute serve" in capsys.readouterr().err
