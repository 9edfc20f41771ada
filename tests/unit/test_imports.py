"""Imports run downwards only: the order of the rooms, as ARCHITECTURE.md has it."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# From the lowest to the highest. A room may import itself and those before it. A single module
# that is not in a room of its own stands for itself.
ORDER = (
    "kvroute.contract",
    "kvroute.keys",
    "kvroute.wire",
    "kvroute.store",
    "kvroute.process",
    "kvroute.settings",
    "kvroute.replica.engine",
    "kvroute.replica.sim_engine",
    "kvroute.replica.vllm_engine",
    "kvroute.replica",
    "kvroute.router.routing",
    "kvroute.router.api",
    "kvroute.router.prompts",
    "kvroute.router.dispatch",
    "kvroute.router.prefixes",
    "kvroute.router.observability",
    "kvroute.router.serving",
    "kvroute.router.endpoints",
    "kvroute.router",
    "kvroute.deployments",
    "kvroute.autoscaling",
    "kvroute.app",
    "kvroute.local",
    "kvroute.client",
    "kvroute.doctor",
    "kvroute.replay",
    "kvroute.command",
    "kvroute.cli",
)


def _dotted(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _room(module: str) -> str:
    """The longest name in ORDER that it begins with."""
    return max((room for room in ORDER if f"{module}.".startswith(f"{room}.")), key=len)


def _imports(module: str) -> Iterator[str]:
    """Our modules that it imports, wherever in its text."""
    path = ROOT / Path(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("kvroute"):
            names = [f"kvroute.{each.name}" for each in node.names]
            yield from names if node.module == "kvroute" else [node.module or ""]
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names if each.name.startswith("kvroute"))


MODULES = [_dotted(file) for file in sorted((ROOT / "kvroute").rglob("*.py"))]


def test_every_module_is_in_a_room() -> None:
    assert {_room(module) for module in MODULES if module != "kvroute"} == set(ORDER)


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_only_downwards(module: str) -> None:
    if module == "kvroute":
        return
    own = ORDER.index(_room(module))
    climbs = [each for each in _imports(module) if ORDER.index(_room(each)) > own]
    assert climbs == []


def test_no_test_imports_another_test_or_a_fixture() -> None:
    """What tests share is in tests.support."""
    rooms = ("unit", "redis", "cluster", "vllm", "nodes")
    bad = tuple(f"tests.{room}" for room in (*rooms, "conftest"))
    for file in (ROOT / "tests").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            modules = [each.name for each in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                modules = [f"{node.module}.{each.name}" for each in node.names]
            climbs = [each for each in modules if f"{each}.".startswith(bad)]
            assert climbs == [], file
