"""The pages for contributors: the example of each can be applied, and its checks pass then."""

from pathlib import Path

import pytest

from tests.support.contributing import PAGES, do_example
from tests.support.repository import ROOT

QUICK = [page for page in PAGES if page.stem != "engine-hook"]  # that one imports vLLM


@pytest.mark.parametrize("page", QUICK, ids=[page.stem for page in QUICK])
def test_the_example_of_a_page_can_be_done(page: Path, tmp_path: Path) -> None:
    do_example(page, tmp_path)


def test_every_page_is_linked() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    assert all(f"docs/contributing/{page.name}" in text for page in PAGES)
    assert len(PAGES) == 6
