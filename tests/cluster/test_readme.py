"""The README's commands and programs work. Those of the other documents: tests/slow/clusters."""

from pathlib import Path

from tests.support.document_steps import check_steps, environment, folder, runnable
from tests.support.documents import README

__all__ = ["environment", "folder"]  # fixtures


def test_every_command_of_the_readme_works(folder: Path, environment: dict[str, str]) -> None:
    assert runnable(README)
    check_steps(README, folder, environment)
