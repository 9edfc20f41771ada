"""Every command and program that the documents show works. Those of the README: tests/cluster."""

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
    name,
)
from tests.support.serving import Cluster

__all__ = ["environment", "folder"]  # fixtures


@pytest.mark.parametrize(
    "document", [path for path in DOCUMENTS if path != README and runnable(path)], ids=name
)
def test_every_command_works(
    document: Path, folder: Path, environment: dict[str, str], simulated_cluster: Cluster
) -> None:
    check_steps(document, simulated_cluster, folder, environment)
