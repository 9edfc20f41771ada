"""The pages for contributors: what takes minutes, or vLLM."""

from pathlib import Path

import pytest

from tests.support.contributing import (
    EXAMPLES,
    PAGES,
    apply_example,
    changes,
    check,
    copy_checkout,
    lint,
    output,
    undo_example,
    writing_commands,
)

HOOKS = next(page for page in PAGES if page.stem == "engine-hook")
OPTIONAL = ["dashboards/cache_hits.py"]  # steps that a page does not require
# All steps of all pages but the first one of each, which is the change itself.
STEPS = [
    pytest.param(page, step, id=f"{page.stem}: {step}")
    for page in EXAMPLES
    for step in (*list(changes(page))[1:], *writing_commands(page))
    if step not in OPTIONAL and "+def test_" not in changes(page).get(step, "")
]


def test_the_hooks_of_an_earlier_version_are_noticed_and_the_page_says_how_to_adapt_them(
    tmp_path: Path,
) -> None:
    """The page's example adapts code for vLLM 0.31 to 0.32."""
    copy_checkout(tmp_path)
    undo_example(HOOKS, tmp_path)
    assert "No module named 'vllm.entrypoints.chat_utils'" in check(HOOKS, tmp_path).stdout
    apply_example(HOOKS, tmp_path)
    lint(HOOKS, tmp_path)
    checked = check(HOOKS, tmp_path)
    assert checked.returncode == 0, output(checked)


@pytest.mark.parametrize("page", EXAMPLES, ids=[page.stem for page in EXAMPLES])
def test_the_example_of_a_page_can_be_done(page: Path, tmp_path: Path) -> None:
    copy_checkout(tmp_path)
    apply_example(page, tmp_path)
    lint(page, tmp_path)
    checked = check(page, tmp_path)
    assert checked.returncode == 0, output(checked)


@pytest.mark.parametrize(("page", "step"), STEPS)
def test_the_check_of_a_page_notices_a_forgotten_step(
    page: Path, step: str, tmp_path: Path
) -> None:
    copy_checkout(tmp_path)
    apply_example(page, tmp_path, without=step)
    checked = check(page, tmp_path)
    assert checked.returncode == 1, output(checked)
