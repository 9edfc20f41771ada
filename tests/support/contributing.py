"""The pages for contributors: each has an example as a diff, and the commands that check it."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

from tests.support.repository import ROOT

PAGES = sorted((ROOT / "docs" / "contributing").glob("*.md"))
NEEDED = ("kvroute", "replica", "router", "tests", "docs", "dashboards", "deploy")
FILES = ("pyproject.toml", "README.md", "ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md")
IGNORED = shutil.ignore_patterns("__pycache__", ".*_cache")


def do_example(page: Path, folder: Path) -> None:
    """Apply the page's example to a copy of the checkout in this folder, and run its checks."""
    for name in NEEDED:
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=IGNORED)
    for name in FILES:
        shutil.copy(ROOT / name, folder)
    (example,) = _blocks(page, "diff")
    (commands,) = _blocks(page, "sh")
    _run(["git", "apply", "-"], folder, example)
    for command in commands.splitlines():
        python, *arguments = command.split()
        assert python == ".venv/bin/python"
        _run([sys.executable, *arguments], folder)


def _blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)


def _run(command: list[str], folder: Path, given: str | None = None) -> None:
    done = subprocess.run(
        command,
        cwd=folder,
        input=given,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(folder), "HOME": str(folder)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
