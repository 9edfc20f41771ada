"""The set-up finds what a machine lacks before it downloads anything, and names the remedy."""

import os
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from kvroute.local.ray_cluster import OBJECT_STORE_BYTES
from scripts.check_machine import (
    GB,
    SHM_GB,
    Needs,
    may_install,
    missing_packages,
    of_this_python,
    read_needs,
    remedy,
    unfit,
    warnings,
)
from tests.support.repository import ROOT

PROFILES = ("cpu", "gpu")
NOTHING = Needs(installed_gb=0, glibc=(2, 0), libraries={}, commands={}, headers={})


def test_this_machine_lacks_nothing() -> None:
    assert list(missing_packages(read_needs("cpu"))) == []


def test_missing_parts_are_reported_with_their_packages() -> None:
    lacking = replace(
        NOTHING,
        libraries={"libnothing.so.9": ("libnothing9",), "libc.so.6": ("libc6",)},
        commands={"no-such-compiler": ("gcc", "libc6-dev"), "sh": ("dash",)},
        headers={"Nothing.h": ("python3-dev",)},
    )
    assert {lack.what: lack.packages for lack in missing_packages(lacking)} == {
        "the shared library libnothing.so.9": ("libnothing9",),
        "the command no-such-compiler": ("gcc", "libc6-dev"),
        "Python's C header Nothing.h": (of_this_python("python3-dev"),),
    }


def test_a_small_disk_and_an_old_system_are_errors_with_a_remedy(tmp_path: Path) -> None:
    old, small = unfit(replace(NOTHING, installed_gb=1e6, glibc=(99, 1)), tmp_path)
    assert re.match(r"glibc 99\.1 or newer; this system has glibc \d.* Debian 12", old.what)
    assert re.match(r"1000000 GB of free disk for .venv; .* has \d.* GB\. Free some", small.what)
    assert list(unfit(NOTHING, tmp_path)) == []


def test_little_memory_is_a_warning_that_names_a_smaller_cluster(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:  8000000 kB\nMemAvailable:  2000000 kB\n")
    (warning,) = warnings(meminfo, shm=Path("/"))
    assert warning.startswith("2.0 GB of memory is free, and `make serve` needs about 7 GB.")
    assert '`make serve ARGS="--engine simulated"`' in warning


def test_no_shared_memory_is_a_warning(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 64000000 kB\nMemAvailable: 32000000 kB\n")
    (warning,) = warnings(meminfo, shm=tmp_path / "none")
    assert warning.startswith("/dev/shm has 0.00 GB, but Ray needs 0.2 GB")
    assert OBJECT_STORE_BYTES == SHM_GB * GB


def test_a_user_who_may_not_install_packages_gets_the_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert not may_install()
    command = "sudo apt-get install --no-install-recommends --yes libnuma1 python3-venv"
    assert remedy(["libnuma1", "python3-venv"]) == f"run: {command}"


def test_other_systems_get_the_names_of_debian_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert not may_install()
    assert remedy(["libnuma1"]).endswith("libnuma1")


def test_a_python_that_is_not_the_systems_default_has_other_packages(tmp_path: Path) -> None:
    version = f"python3.{sys.version_info.minor}"
    own, other = tmp_path / version, tmp_path / "python3.0"
    for file in (own, other):
        file.touch()
    assert of_this_python("python3-venv", own) == "python3-venv"
    assert of_this_python("python3-venv", other) == f"{version}-venv"


def test_the_image_has_what_the_wheels_need() -> None:
    """A test of tests/slow/image builds the image and starts it."""
    assert 'scripts/check_machine.py "$PROFILE"' in (ROOT / "deploy" / "Dockerfile").read_text()
