"""What requirements/machine-cpu.txt asks of a machine is what the locked wheels need."""

import re

import pytest

from scripts.read_wheels import machine_file
from tests.support.repository import ROOT
from tests.support.untested import needs


@needs("dpkg")
@pytest.mark.skipif(not (ROOT / ".venv/ready-cpu").exists(), reason="no packages for CPUs here")
def test_the_needs_file_for_cpus_fits_the_installed_wheels() -> None:
    file = (ROOT / "requirements" / "machine-cpu.txt").read_text()
    size = re.compile("installed-gb .*")
    assert size.sub("", machine_file("cpu", ROOT / ".venv")) == size.sub("", file)
