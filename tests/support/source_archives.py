"""Source archives from the package index: downloaded once, checked, and unpacked for a test."""

import hashlib
import tarfile
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

FOLDER = Path.home() / ".cache/kvroute/source-archives"
TIMEOUT_S = 120.0  # for each read from the index


def source_archive(url: str, *, sha256: str) -> Path:
    """Return the archive's path; skip the test if it cannot be downloaded."""
    path = FOLDER / url.rpartition("/")[2]
    if not path.exists() or _sha256(path.read_bytes()) != sha256:
        FOLDER.mkdir(parents=True, exist_ok=True)
        path.write_bytes(_download(url))
    assert _sha256(path.read_bytes()) == sha256, f"{path} is not the archive that we pinned"
    return path


def unpack(archive: Path, folder: Path, *, wanted: Callable[[str], bool]) -> None:
    """Unpack the wanted files, whose names are those below the archive's top folder."""
    with tarfile.open(archive) as opened:
        for member in opened:
            _, _, member.name = member.name.partition("/")
            if wanted(member.name):
                opened.extract(member, folder, filter="data")


def _download(url: str) -> bytes:
    try:
        response = httpx.get(url, timeout=TIMEOUT_S, follow_redirects=True).raise_for_status()
    except httpx.HTTPError as error:
        pytest.skip(f"{url} cannot be downloaded: {error!r}")
    return response.content


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
