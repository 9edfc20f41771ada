"""The pages for contributors: their examples fit the code, and their paths and names exist."""

import re
from pathlib import Path

import pytest

from tests.support.contributing import (
    EXAMPLES,
    PAGES,
    PYTHON,
    changes,
    check_command,
    check_that_it_fits,
    wrong_headings,
)
from tests.support.documents import DOCUMENTS, FENCED, ROOT
from tests.support.repository import product_modules

MODULES = [*product_modules(), *sorted((ROOT / "tests").rglob("*.py"))]
SOURCES = "".join(module.read_text() for module in MODULES)
FILES = [str(file.relative_to(ROOT)) for file in (*MODULES, *DOCUMENTS)]


def quoted(page: Path) -> set[str]:
    """Return what the page's text has in backquotes."""
    return set(re.findall(r"`([^`\n]+)`", FENCED.sub("", page.read_text())))


@pytest.mark.parametrize("page", EXAMPLES, ids=[page.stem for page in EXAMPLES])
def test_the_example_of_a_page_fits_the_code(page: Path) -> None:
    """Its commands also pass: tests/slow/engines/test_contributing_steps.py."""
    check_that_it_fits(page)


@pytest.mark.parametrize("page", EXAMPLES, ids=[page.stem for page in EXAMPLES])
def test_an_example_names_the_function_that_it_changes(page: Path) -> None:
    assert wrong_headings(page) == []


def test_each_example_changes_files_and_ends_with_a_check() -> None:
    """Its check is a command of Python, which test_contributing_steps.py runs elsewhere."""
    for page in EXAMPLES:
        assert changes(page), page
        assert check_command(page).startswith(PYTHON), page


def test_every_page_is_linked() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    assert all(f"docs/contributing/{page.name}" in text for page in PAGES)
    assert len(PAGES) == 8


@pytest.mark.parametrize("page", PAGES, ids=[page.stem for page in PAGES])
def test_the_paths_and_names_of_a_page_exist(page: Path) -> None:
    """A module may be named without its folder, where the page has said which one."""
    added = "".join(changes(page).values())
    for each in quoted(page):
        if re.fullmatch(r"[\w.]+(/[\w.]+)*\.(py|md)", each):
            assert any(f"/{file}".endswith(f"/{each}") for file in FILES), each
        elif re.fullmatch(r"\w+(/\w+)+/?", each):
            assert (ROOT / each).exists(), each
        elif re.fullmatch(r"[\w.]+(\(\))?", each):
            parts = each.removesuffix("()").split(".")
            assert all(part in SOURCES or part in added for part in parts), each
