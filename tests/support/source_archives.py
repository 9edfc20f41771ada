"""Source archives from the package index: downloaded once, checked, and unpacked for a test."""

import hashlib
import subprocess
import tarfile
import tomllib
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from tests.support.environments import CACHE, UV

TIMEOUT_S = 120.0  # timeout for each read from the index, in seconds


def source_archive(package: str, version: str, *, sha256: str) -> Path:
    """Return the path of a package's source archive; skip the test if it cannot be downloaded."""
    path = CACHE / "source-archives" / f"{package}-{version}.tar.gz"
    if not path.exists() or _sha256(path.read_bytes()) != sha256:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(_download(package, version))
    assert _sha256(path.read_bytes()) == sha256, f"{path} is not the archive that we pinned"
    return path


def unpack(archive: Path, folder: Path, *, wanted: Callable[[str], bool]) -> None:
    """Unpack the files for which `wanted` is true. It gets names relative to the top folder."""
    with tarfile.open(archive) as opened:
        for member in opened:
            _, _, member.name = member.name.partition("/")
            if wanted(member.name):
                opened.extract(member, folder, filter="data")


def _download(package: str, version: str) -> bytes:
    try:
        url = _address(package, version)
        response = httpx.get(url, timeout=TIMEOUT_S, follow_redirects=True).raise_for_status()
    except (subprocess.CalledProcessError, httpx.HTTPError) as error:
        pytest.skip(f"the sources of {package} {version} cannot be downloaded: {error!r}")
    return response.content


def _address(package: str, version: str) -> str:
    """Return the address of a source archive in the package index that uv is configured for.

    pip and uv cannot download the archive themselves without preparing its build, which needs a
    compiler for vLLM.
    """
    locked = subprocess.run(
        [UV, "pip", "compile", "-", "--no-deps", "--quiet", "--format", "pylock.toml"],
        input=f"{package}=={version}",
        capture_output=True,
        text=True,
        check=True,
    )
    return str(tomllib.loads(locked.stdout)["packages"][0]["sdist"]["url"])


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
