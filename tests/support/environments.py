"""Virtual environments of their own for suites whose packages kvroute's environment lacks."""

import hashlib
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.repository import ROOT

CACHE = Path.home() / ".cache/kvroute"
UV = str(Path(sys.executable).with_name("uv"))


def environment(name: str) -> Path:
    """Return the Python of an environment with what `requirements/NAME.lock` names.

    It is made once for each lock. The test is skipped if the packages cannot be downloaded.
    """
    lock = ROOT / f"requirements/{name}.lock"
    folder = CACHE / "environments" / f"{name}-{hashlib.sha256(lock.read_bytes()).hexdigest()[:12]}"
    python, ready = folder / "bin/python", folder / "ready"
    if not ready.exists():
        _run("venv", "--clear", "--python", sys.executable, str(folder))
        _run("pip", "sync", "--require-hashes", "--python", str(python), str(lock))
        ready.touch()
    return python


def _run(*arguments: str) -> None:
    done = subprocess.run([UV, *arguments, "--quiet"], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"the suite's packages cannot be installed: {done.stderr[-1000:]}")
