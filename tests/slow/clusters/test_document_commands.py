"""Every command and program that the documents show works.

Those of the README and of the first steps: tests/cluster.
"""

from pathlib import Path

import pytest

from tests.support.document_steps import (
    check_steps,
    environment,
    folder,
    runnable,
)
from tests.support.documents import (
    DOCUMENTS,
    README,
    START,
    name,
)

__all__ = ["environment", "folder"]  # fixtures


@pytest.mark.parametrize(
    "document",
    [path for path in DOCUMENTS if path not in (README, START) and runnable(path)],
    ids=name,
)
def test_every_command_works(document: Path, folder: Path, environment: dict[str, str]) -> None:
    check_steps(document, folder, environment)
