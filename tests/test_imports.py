"""Which package may know of which: the rule of ARCHITECTURE.md."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def imported_by(package: str) -> set[str]:
    """Our modules that it imports."""
    trees = [ast.parse(file.read_text()) for file in (ROOT / package).rglob("*.py")]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    names = {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    names |= {name.name for node in nodes if isinstance(node, ast.Import) for name in node.names}
    return {name for name in names if is_in(name, ("router", "replica"))}


@pytest.mark.parametrize(
    ("package", "allowed"),
    [
        ("replica/kvindex", ("replica.kvindex",)),
        ("replica", ("replica",)),
        ("router/routing", ("replica", "router.routing")),
        ("router/streams", ("replica", "router.streams", "router.routing", "router.api")),
        ("router/named", ("replica", "router.named", "router.routing", "router.api")),
    ],
)
def test_a_package_knows_only_those_below_it(package: str, allowed: tuple[str, ...]) -> None:
    known = imported_by(package)
    assert known
    assert {each for each in known if not is_in(each, allowed)} == set()


def is_in(module: str, packages: tuple[str, ...]) -> bool:
    return any(f"{module}.".startswith(f"{package}.") for package in packages)
