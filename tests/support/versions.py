"""Other versions of kvroute, which run with the packages of this environment."""

import os
import shutil
import subprocess
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.repository import ROOT
from tests.support.serving import COMMAND, KVROUTE, Cluster, start_cluster


@dataclass(frozen=True)
class Version:
    """A version of kvroute: a folder with its source tree."""

    folder: Path

    def start(self, *options: str) -> AbstractContextManager[Cluster]:
        """Run this version's `kvroute serve`, as `start_cluster` does."""
        command = (*self._here(), *COMMAND)
        return start_cluster(*options, command=command, env=self._variables())

    def run(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        """Run a command of this version."""
        command, variables = (*self._here(), *KVROUTE, *arguments), os.environ | self._variables()
        return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=110)

    def _here(self) -> tuple[str, ...]:
        """Return a command that runs another one in the folder, where Python looks first."""
        return "env", "--chdir", str(self.folder)

    def _variables(self) -> dict[str, str]:
        """Return the variables with which Ray's processes find this version, too."""
        return {"PYTHONPATH": str(self.folder)}


THIS = Version(ROOT)


def version_at(commit: str, folder: Path) -> Version:
    """Write the source tree of a commit or tag into a new folder; skip the test without it."""
    folder.mkdir()
    packed = subprocess.run(["git", "archive", commit], cwd=ROOT, capture_output=True)
    if packed.returncode:
        reason = "it is not released, or this is no clone, or a shallow one"
        pytest.skip(f"{commit[:8]} is not here: {reason}")
    subprocess.run(["tar", "-x", "-C", str(folder)], input=packed.stdout, check=True)
    return Version(folder)


def changed_version(folder: Path, changes: Mapping[str, tuple[str, str]]) -> Version:
    """Write this source tree with changed lines into a new folder.

    Args:
        folder: the folder, which must not exist.
        changes: path of a file -> text in it, and what replaces that.
    """
    folder.mkdir()
    for name in ("kvroute", "replica", "router"):
        no_caches = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=no_caches)
    for path, (text, other) in changes.items():
        source = (folder / path).read_text()
        assert text in source
        (folder / path).write_text(source.replace(text, other))
    return Version(folder)
