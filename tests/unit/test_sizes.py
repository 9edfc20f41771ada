"""Modules, classes and packages stay small enough to be read at once."""

import ast
from collections import Counter

from tests.support.repository import ROOT, product_modules

MAX_LINES = 450  # lines of a module
MAX_PUBLIC_METHODS = 20  # public methods and properties of a class
MAX_MODULES = 15  # modules of a package, besides its __init__.py

FILES = {str(file.relative_to(ROOT)): file for file in product_modules()}


def test_no_module_is_too_long() -> None:
    lines = {name: len(file.read_text().splitlines()) for name, file in FILES.items()}
    assert {name: count for name, count in lines.items() if count > MAX_LINES} == {}


def test_no_class_has_too_many_public_methods() -> None:
    counts = {
        f"{name}: {node.name}": sum(map(_is_public_method, node.body))
        for name, file in FILES.items()
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ClassDef)
    }
    assert {name: count for name, count in counts.items() if count > MAX_PUBLIC_METHODS} == {}


def test_no_package_has_too_many_modules() -> None:
    modules = [file for file in FILES.values() if file.name != "__init__.py"]
    counts = Counter(str(file.parent.relative_to(ROOT)) for file in modules)
    assert {name: count for name, count in counts.items() if count > MAX_MODULES} == {}


def _is_public_method(node: ast.stmt) -> bool:
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return False
    return not node.name.startswith("_")
