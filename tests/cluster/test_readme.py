"""The commands and programs of the README and of the first steps work.

Those of the other documents: tests/slow/clusters.
"""

from pathlib import Path

import pytest

from tests.support.document_steps import check_steps, environment, folder, runnable
from tests.support.documents import README, START, name

__all__ = ["environment", "folder"]  # fixtures


@pytest.mark.parametrize("document", [README, START], ids=name)
def test_every_command_works(document: Path, folder: Path, environment: dict[str, str]) -> None:
    assert runnable(document)
    check_steps(document, folder, environment)
