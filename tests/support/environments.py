"""Virtual environments for test suites that need packages outside kvroute's environment."""

import hashlib
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.support.repository import ROOT

CACHE = Path.home() / ".cache/kvroute"
UV = str(Path(sys.executable).with_name("uv"))


def environment(name: str, *, with_ours: bool = False) -> Path:
    """Return the Python of an environment with the packages of `requirements/NAME.lock`.

    The environment is created once for each version of the file (and each place of kvroute's own
    packages, if it shows them). The test is skipped if the
    packages cannot be downloaded.

    Args:
        name: the name of the lock.
        with_ours: also show the packages of kvroute's environment that the lock does not have.
    """
    lock = ROOT / f"requirements/{name}.lock"
    ours = os.path.realpath(sysconfig.get_path("purelib")) if with_ours else ""
    digest = hashlib.sha256(lock.read_bytes() + ours.encode()).hexdigest()[:12]
    folder = CACHE / "environments" / f"{name}-{digest}"
    python, ready = folder / "bin/python", folder / "ready"
    if not ready.exists():
        _run("venv", "--clear", "--python", sys.executable, str(folder))
        _run("pip", "sync", "--require-hashes", "--python", str(python), str(lock))
        if ours:
            (_packages(folder) / "ours.pth").write_text(f"import site; site.addsitedir({ours!r})\n")
        ready.touch()
    return python


def _packages(environment: Path) -> Path:
    """Return the folder with the packages of an environment."""
    (folder,) = environment.glob("lib/python*/site-packages")
    return folder


def _run(*arguments: str) -> None:
    done = subprocess.run([UV, *arguments, "--quiet"], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"the suite's packages cannot be installed: {done.stderr[-1000:]}")
