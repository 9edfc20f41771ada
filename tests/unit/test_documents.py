"""What the documents say is true: tables, links, routes, and names of commands."""

import json
import re
from collections.abc import Iterator

import yaml
from typer.testing import CliRunner

from kvroute.cli import app
from kvroute.contract.error_codes import anthropic_type_of, type_of
from kvroute.features import ALL_CODES
from kvroute.process.builtin_model import BUILTIN_MODEL
from kvroute.replica.sim_engine.sampling import Chat, Completion
from tests.support.document_steps import (
    HERE,
    LANGUAGES,
    NOT_HERE,
    SHOWS,
    reason,
    shell_commands,
)
from tests.support.documents import (
    ADDRESS,
    API,
    DOCUMENTS,
    ERRORS,
    FENCED,
    METRICS,
    README,
    ROOT,
    SETTINGS,
    anchors,
    blocks,
    links,
    name,
    steps,
    words,
)
from tests.support.metrics_table import metrics_table
from tests.support.routes import routes
from tests.support.settings_table import settings_table

ROOT_PAGES = {path.name.lower() for path in ROOT.glob("*.md") if path != README}


def test_every_setting_is_in_its_page_as_it_is() -> None:
    assert settings_table() in SETTINGS.read_text()


def test_every_metric_is_in_its_page_as_it_is() -> None:
    assert metrics_table() in METRICS.read_text()


def test_every_route_is_in_the_api_page() -> None:
    """By the part of its path before the first parameter."""
    text = API.read_text()
    paths = {path.partition("{")[0].rstrip("/") for _, path in routes()}
    assert [path for path in sorted(paths) if not re.search(rf"{path}(?![\w-])", text)] == []


def test_every_error_is_in_its_page() -> None:
    text = ERRORS.read_text()
    assert re.findall(r"^\| `(\w+)` \| \d", text, re.MULTILINE) == sorted(ALL_CODES)
    rows = re.findall(r"^\| ([\d, ]+) \| `(\w+)` \| `(\w+)` \|$", text, re.MULTILINE)
    assert rows
    for statuses, openais, anthropics in rows:
        for status in map(int, statuses.split(", ")):
            assert (type_of(status), anthropic_type_of(status)) == (openais, anthropics)


def test_every_request_field_is_in_the_api_page() -> None:
    fields = {*Chat.__struct_fields__, *Completion.__struct_fields__}
    assert fields <= set(re.findall(r"`(\w+)`", API.read_text()))


def test_the_built_in_model_is_named_as_it_is() -> None:
    assert f'"model": "{BUILTIN_MODEL}"' in README.read_text()


def test_every_link_leads_somewhere() -> None:
    for document in DOCUMENTS:
        for link in links(document):
            path, _, anchor = link.partition("#")
            target = document.parent / path if path else document
            assert target.exists(), (name(document), link)
            assert not anchor or anchor in anchors(target), (name(document), link)


def test_every_page_is_in_the_navigation_of_the_site() -> None:
    """And the navigation names no page that is missing. scripts/site_pages.py adds root pages."""
    pages = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    named = sorted(named_pages(nav))
    assert named == sorted({*pages, "index.md", *ROOT_PAGES})


def test_the_pages_of_the_root_folder_are_on_the_site() -> None:
    hook = (ROOT / "scripts" / "site_pages.py").read_text()
    for path in ROOT.glob("*.md"):
        page = "index.md" if path == README else path.name.lower()
        assert f'"{path.name}": "{page}"' in hook


def test_programs_and_commands_take_the_address_from_the_environment() -> None:
    default = f'os.environ.get("KVROUTE_URL", "{ADDRESS}")'
    for document in DOCUMENTS:
        for step in steps(document):
            if step.language == "python" and (
                "base_url" in step.text or "KVROUTE_URL" in step.text
            ):
                assert default in step.text, (name(document), step.text)
                assert ":8000" not in step.text.replace(default, ""), (name(document), step.text)
            if step.language == "sh" and step.text.startswith("curl"):
                assert ":8000" not in step.text, (name(document), step.text)


def named_pages(nav: object) -> Iterator[str]:
    """Yield the pages that a part of the navigation names."""
    if isinstance(nav, str):
        yield nav
    elif isinstance(nav, dict):
        for part in nav.values():
            yield from named_pages(part)
    elif isinstance(nav, list):
        for part in nav:
            yield from named_pages(part)


def test_every_alert_has_a_section_on_its_page() -> None:
    rules = yaml.safe_load((ROOT / "deploy" / "prometheus" / "alerts.yml").read_text())
    alerts = {rule["alert"].lower() for group in rules["groups"] for rule in group["rules"]}
    page = anchors(ROOT / "docs" / "operations" / "alerts.md")
    assert {anchor for anchor in page if anchor.startswith("kvroute")} == alerts


def test_no_line_of_text_is_too_long() -> None:
    """Tables, headings, code and addresses may be."""
    for document in DOCUMENTS:
        for line in FENCED.sub("", document.read_text()).splitlines():
            if not line.startswith(("|", "#", "!")) and " " in line.strip("- "):
                assert len(line) <= 100, f"{name(document)}: {line}"


def test_every_code_block_says_what_it_is() -> None:
    for document in DOCUMENTS:
        assert {block.language for block in blocks(document)} <= LANGUAGES, name(document)
        for block in blocks(document):
            if block.language == "json":
                json.loads(block.text)


def test_the_scrape_configuration_is_the_shipped_one() -> None:
    (shown,) = (block.text for block in blocks(METRICS) if block.language == "yaml")
    shipped = (ROOT / "deploy" / "prometheus" / "prometheus.yml").read_text()
    assert yaml.safe_load(shown)["scrape_configs"] == yaml.safe_load(shipped)["scrape_configs"]


def test_what_is_not_run_here_is_in_a_document() -> None:
    assert {reason(command) for command in shell_commands()} - {None} == set(NOT_HERE)


def test_every_other_command_is_run() -> None:
    assert {
        words(shell_command)[0] for shell_command in shell_commands() if not reason(shell_command)
    } <= HERE


def test_every_target_of_make_exists() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = {words(command)[1] for command in shell_commands() if command.startswith("make ")}
    assert targets
    assert all(f"\n{target}:" in makefile for target in targets)


def test_every_file_of_ours_that_a_command_names_exists() -> None:
    named = {word for command in shell_commands() for word in words(command)}
    files = {word.removeprefix("$PWD/") for word in named if re.search(r"^(\$PWD/)?deploy/", word)}
    assert files
    assert all((ROOT / file).exists() for file in files)


def test_the_options_of_every_command_that_is_not_run_exist() -> None:
    for command in filter(reason, shell_commands()):
        if "kvroute" in (typed := words(command)) and typed[0] != "docker":
            arguments = typed[typed.index("kvroute") + 1 :]
            assert CliRunner().invoke(app, [*arguments, "--help"]).exit_code == 0, command


def test_what_a_step_is_to_show_is_of_a_step() -> None:
    texts = [step.text for path in DOCUMENTS for step in steps(path)]
    assert all(any(text in step for step in texts) for text in SHOWS)


def test_no_command_that_starts_a_cluster_is_run_on_the_cluster_of_the_tests() -> None:
    starts = [text for text in shell_commands() if words(text)[:2] == ["kvroute", "serve"]]
    assert starts
    assert [text for text in starts if reason(text) is None] == []
