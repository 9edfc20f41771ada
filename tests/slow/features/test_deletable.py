"""Without its folder and its line in the list, a feature is gone, and all else works."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from kvroute.features import FEATURES
from tests.support.contributing import copy_checkout
from tests.support.repository import ROOT

NAMES = [feature.name for feature in FEATURES]
# Modules that import everything in one kind of process.
ENTRIES = ("kvroute.cli", "kvroute.router.ingress", "kvroute.replica.deployment", "kvroute.app")
# Tests of documents, whose pages about a feature stay, and of this checkout as a whole.
OF_DOCUMENTS = (
    *("architecture", "containers", "contributing", "dashboards", "documents", "help_pages"),
    *("mutations", "names", "packaging", "parts", "printed", "test_order", "untested"),
    "without_units",
)


@pytest.mark.parametrize("name", NAMES)
def test_the_rest_of_kvroute_needs_no_feature(name: str, tmp_path: Path) -> None:
    copy_without([name], tmp_path)
    python(tmp_path, "-W", "ignore", "-c", "; ".join(f"import {entry}" for entry in ENTRIES))
    python(tmp_path, "-m", "mypy", "-p", "kvroute")


def test_the_core_without_features_passes_its_tests(tmp_path: Path) -> None:
    copy_without(NAMES, tmp_path)
    ignored = [f"--ignore=tests/unit/test_{name}.py" for name in OF_DOCUMENTS]
    options = (
        "-q",
        "--maxfail",
        "20",
        "-p",
        "no:cacheprovider",
        "--numprocesses",
        "2",
        "--dist",
        "loadfile",
    )
    python(tmp_path, "-m", "pytest", *options, *ignored, "tests/unit")


def copy_without(names: Iterable[str], checkout: Path) -> None:
    """Write a copy of this checkout without some features."""
    copy_checkout(checkout)
    if (ROOT / ".mypy_cache").is_dir():  # with it, mypy takes seconds
        shutil.copytree(ROOT / ".mypy_cache", checkout / ".mypy_cache")
    listed = checkout / "kvroute" / "features" / "__init__.py"
    for name in names:
        shutil.rmtree(checkout / "kvroute" / "features" / name)
        shutil.rmtree(checkout / "tests" / "features" / name)
        listed.write_text(without(name, listed.read_text()))


def without(name: str, text: str) -> str:
    """Return the list of features without one: its line, and its name in the import."""
    text = re.sub(rf"^    {name}(\.\w+\(\))?,\n", "", text, flags=re.MULTILINE)
    return text.replace("from kvroute.features import (\n)\n", "")


def python(checkout: Path, *arguments: str) -> None:
    """Run Python in the copy, and expect success."""
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=checkout, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
