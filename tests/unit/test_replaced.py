"""replica/vllm_engine/replaced.py lists all that kvroute replaces in vLLM, and nothing else."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvroute.replica.vllm_engine.replaced import OF_OBJECTS, Replacement
from tests.support.documents import ROOT
from tests.support.hooks import REPLACED

ENGINE = ROOT / "replica" / "vllm_engine"


@pytest.mark.parametrize("each", [*REPLACED, *OF_OBJECTS], ids=lambda each: each.name)
def test_every_replacement_is_in_the_module_that_the_list_names(each: Replacement) -> None:
    module, _, name = each.by.rpartition(".")
    tree = ast.parse((ENGINE / module.replace(".", "/")).with_suffix(".py").read_text())
    defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    for node in tree.body:
        if isinstance(node, ast.Assign):
            defined |= {name.id for name in ast.walk(node.targets[0]) if isinstance(name, ast.Name)}
    assert name in defined


def changed(file: Path) -> Iterator[str]:
    """Yield the names of vLLM's modules, classes and functions that a module assigns to."""
    tree = ast.parse(file.read_text())
    vllms = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("vllm")
        for alias in node.names
    }
    for node in ast.walk(tree):
        targets = node.targets if isinstance(node, ast.Assign) else []
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "setattr":
            targets = [ast.Attribute(node.args[0], "...")]
        for target in targets:
            owner = target
            while isinstance(owner, ast.Attribute | ast.Subscript):
                owner = owner.value
            if owner is not target and isinstance(owner, ast.Name) and owner.id in vllms:
                yield f"{file.relative_to(ENGINE)}: {ast.unparse(target)}"


def test_no_other_module_replaces_names_of_vllm() -> None:
    found = [each for file in sorted(ENGINE.rglob("*.py")) for each in changed(file)]
    assert found == ["core/scheduler.py: EngineCore...."]  # it adds methods, and replaces none
