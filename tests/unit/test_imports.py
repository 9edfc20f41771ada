"""Imports run downwards only: a package imports itself and packages below it."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from kvroute.features import FEATURES
from tests.support.repository import LINKED, ROOT, product_modules

# The packages and single modules of kvroute, from the lowest to the highest, as in the table of
# docs/design/packages.md.
ORDER = (
    "kvroute.wording",
    "kvroute.blocks",
    "kvroute.prefill",
    "kvroute.contract",
    "kvroute.features",
    "kvroute.wire",
    "kvroute.store",
    "kvroute.process",
    "kvroute.settings",
    "kvroute.batch",
    "kvroute.replica.engine",
    "kvroute.replica.fabric",
    "kvroute.replica.modelled",
    "kvroute.replica.sim_engine",
    "kvroute.replica.vllm_engine.compat",
    "kvroute.replica.vllm_engine.hooks",
    "kvroute.replica.vllm_engine.optional_parts",
    "kvroute.replica.vllm_engine.replaced",
    "kvroute.replica.vllm_engine.process",
    "kvroute.replica.vllm_engine.blocks",
    "kvroute.replica.vllm_engine.host",
    "kvroute.replica.vllm_engine.grammar",
    "kvroute.replica.vllm_engine.core",
    "kvroute.replica.vllm_engine.http",
    "kvroute.replica.vllm_engine",
    "kvroute.replica.attached_engine",
    "kvroute.replica",
    "kvroute.router.index",
    "kvroute.router.sessions",
    "kvroute.router.placement",
    "kvroute.router.api",
    "kvroute.router.history",
    "kvroute.router.queueing",
    "kvroute.router.middleware",
    "kvroute.router.prompts",
    "kvroute.router.connections",
    "kvroute.router.dispatch",
    "kvroute.router.observability",
    "kvroute.router.serving",
    "kvroute.router.endpoints",
    "kvroute.router",
    "kvroute.deployments",
    "kvroute.autoscaling",
    "kvroute.app",
    "kvroute.local.haproxy",
    "kvroute.machine",
    "kvroute.local",
    "kvroute.gateway",
    "kvroute.controller",
    "kvroute.client",
    "kvroute.doctor",
    "kvroute.replay.hardware",
    "kvroute.replay.workload",
    "kvroute.replay.policies",
    "kvroute.replay",
    "kvroute.command",
    *(f"kvroute.features.{feature.name}" for feature in FEATURES),
    "kvroute.cli",
)


def _dotted(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _package(module: str) -> str:
    """Return the longest name in ORDER that the module's name begins with."""
    return max((name for name in ORDER if f"{module}.".startswith(f"{name}.")), key=len)


def _imports(module: str) -> Iterator[str]:
    """Yield the modules of kvroute that it imports when it runs, at the top or in functions."""
    path = ROOT / Path(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    for node in _run(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("kvroute"):
            names = [f"kvroute.{name.name}" for name in node.names]
            yield from names if node.module == "kvroute" else [node.module or ""]
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names if name.name.startswith("kvroute"))


def _run(node: ast.AST) -> Iterator[ast.AST]:
    """Yield all nodes below this one, except those that only type checkers read."""
    for child in ast.iter_child_nodes(node):
        if not (isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"):
            yield child
            yield from _run(child)


def _feature(module: str) -> str:
    """Return the feature in whose folder a module is; empty: it belongs to the core."""
    names = (feature.name for feature in FEATURES)
    inside = (name for name in names if f"{module}.".startswith(f"kvroute.features.{name}."))
    return next(inside, "")


MODULES = [module for module in map(_dotted, product_modules()) if module != "kvroute"]


def test_every_module_is_in_a_package_of_the_order() -> None:
    assert {_package(module) for module in MODULES} == set(ORDER)


def test_modules_import_only_downwards() -> None:
    upwards = [
        f"{module} imports {imported}"
        for module in MODULES
        for imported in _imports(module)
        if ORDER.index(_package(imported)) > ORDER.index(_package(module))
        and module != "kvroute.features"  # the list
    ]
    assert upwards == []


def test_only_the_list_imports_features_and_no_feature_imports_another() -> None:
    imports = [
        f"{module} imports {imported}"
        for module in MODULES
        for imported in _imports(module)
        if _feature(imported) not in ("", _feature(module)) and module != "kvroute.features"
    ]
    assert imports == []


def test_only_engines_one_feature_and_replays_know_how_blocks_move_between_replicas() -> None:
    fabric = "kvroute.replica.fabric"
    engines = ("kvroute.replica.sim_engine", "kvroute.replica.vllm_engine")
    allowed = (fabric, *engines, "kvroute.features.pulls", "kvroute.replay")
    users = [
        module
        for module in MODULES
        if any(f"{imported}.".startswith(f"{fabric}.") for imported in _imports(module))
    ]
    assert [user for user in users if not user.startswith(allowed)] == []


def test_the_list_of_features_imports_nothing_heavy() -> None:
    """Every process and every command imports it."""
    program = "import sys, kvroute.features; print(*sys.modules)"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    modules = [each for each in done.stdout.split() if each.startswith("kvroute.")]
    outside = {each for each in modules if not each.startswith("kvroute.features")}
    light = {"contract", "contract.error_codes", "contract.unreadable", "wording"}
    assert outside <= {f"kvroute.{name}" for name in light}
    assert not {"fastapi", "pydantic", "ray"} & {*done.stdout.split()}


def test_nobody_imports_the_linked_folders_by_their_names_at_the_top() -> None:
    """`import router` would load a second copy of every module of `kvroute.router`."""
    for file in product_modules():
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom):
                assert (node.module or "").partition(".")[0] not in LINKED, file
            if isinstance(node, ast.Import):
                assert not {name.name.partition(".")[0] for name in node.names} & {*LINKED}, file


def test_no_test_imports_another_test_or_a_fixture() -> None:
    """Code that tests share is in tests.support."""
    folders = ("unit", "redis", "cluster", "vllm", "slow")
    bad = tuple(f"tests.{folder}" for folder in (*folders, "conftest"))
    for file in (ROOT / "tests").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            modules = [name.name for name in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                modules = [f"{node.module}.{name.name}" for name in node.names]
            climbs = [each for each in modules if f"{each}.".startswith(bad)]
            assert climbs == [], file
