"""The page about hooks: its example can be applied, and its check passes then."""

from pathlib import Path

from tests.support.contributing import PAGES, do_example


def test_the_example_of_the_page_can_be_done(tmp_path: Path) -> None:
    (page,) = (page for page in PAGES if page.stem == "engine-hook")
    do_example(page, tmp_path)
