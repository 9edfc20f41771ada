"""What the image contains, and what it does not."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.licences import LOCKS, locked, normalised
from tests.support.images import IMAGE, Images
from tests.support.repository import ROOT

pytestmark = pytest.mark.timeout(3600)
MB = 1e6


@pytest.fixture(scope="module")
def root(images: Images) -> Iterator[Path]:
    """The image's files."""
    yield Path(images.run("image", "mount", IMAGE).strip())
    images.run("image", "unmount", "--force", IMAGE)


@pytest.fixture(scope="module")
def layers(images: Images, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Path]]:
    """The uncompressed archives of all layers, the lowest first."""
    folder = tmp_path_factory.mktemp("layers") / "image"
    images.run("save", "--format", "docker-dir", "--output", str(folder), IMAGE)
    manifest = json.loads((folder / "manifest.json").read_text())
    yield [folder / layer["digest"].removeprefix("sha256:") for layer in manifest["layers"]]
    shutil.rmtree(folder)


def test_the_sizes_are_reported(images: Images, layers: list[Path]) -> None:
    (described,) = json.loads(images.run("image", "inspect", IMAGE))
    sizes = [f"{path.stat().st_size / MB:.0f}" for path in layers]
    print(f"image: {described['Size'] / MB:,.0f} MB; layers: {', '.join(sizes)} MB")
    assert len(sizes) <= 4


def test_no_layer_has_the_builders_settings(images: Images, layers: list[Path]) -> None:
    marks = images.marks()
    assert marks
    for layer in layers:
        assert found_in(layer, marks) == [], layer.name
    described = images.run("image", "inspect", IMAGE) + images.run("history", "--no-trunc", IMAGE)
    assert not any(mark in described for mark in marks)


def found_in(layer: Path, marks: list[str]) -> list[str]:
    """Return the marks in the files of a layer."""
    patterns = [part for mark in marks for part in ("-e", mark)]
    search = ["grep", "--text", "--only-matching", "--fixed-strings", *patterns, str(layer)]
    done = subprocess.run(search, capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stderr
    return done.stdout.splitlines()


def test_a_setting_that_stays_in_a_layer_would_be_found(layers: list[Path]) -> None:
    assert found_in(layers[-1], ["RAY_AUTH_MODE"])


def test_it_has_no_compiler(root: Path) -> None:
    compilers = ("cc", "gcc", "g++", "clang", "ld", "as")
    assert [name for name in compilers if (root / "usr/bin" / name).exists()] == []


def test_it_has_no_caches_and_no_logs_of_the_build(root: Path) -> None:
    kept = ("var/lib/apt/lists", "var/cache/apt", "root/.cache", "home/kvroute/.cache")
    files = [path for name in kept for path in (root / name).rglob("*") if path.is_file()]
    assert files == []
    assert not (root / "opt/kvroute/.venv/setup.log").exists()


def test_its_user_can_change_nothing_of_the_program(root: Path) -> None:
    """Root owns each file below /opt, and others cannot write it."""
    found = ["find", str(root / "opt/kvroute"), "!", "-type", "l", "(", "!", "-uid", "0"]
    done = subprocess.run([*found, "-o", "-perm", "/022", ")"], capture_output=True, text=True)
    assert done.stdout == ""


def test_it_has_this_checkout(root: Path) -> None:
    for name in ("kvroute/cli.py", "router/app.py", "deploy/serve.yaml", "LICENSE"):
        if (ROOT / name).exists():
            assert (root / "opt/kvroute" / name).read_bytes() == (ROOT / name).read_bytes(), name


def test_the_list_of_parts_has_every_package(root: Path, tmp_path: Path) -> None:
    file = tmp_path / "sbom.cdx.json"
    script = str(ROOT / "scripts/sbom.sh")
    done = subprocess.run([script, f"dir:{root}", str(file)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    parts = json.loads(file.read_text())
    assert parts["bomFormat"] == "CycloneDX"
    addresses = [part["purl"] for part in parts["components"] if "purl" in part]
    named = re.compile(r"pkg:(?:pypi|deb/debian)/([^@]+)@")
    names = {normalised(found[1]) for address in addresses if (found := named.match(address))}
    assert locked(LOCKS / "cpu.lock") <= names
    assert {"torch", "kvroute", "libnuma1", "libc6", "curl"} <= names
    assert any(address.startswith("pkg:generic/haproxy@") for address in addresses)
    print(done.stdout.strip())
