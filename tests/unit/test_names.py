"""Every class and every module has a name of its own, so that a search by name finds one place."""

import ast
from collections import Counter

from tests.support.repository import product_modules

# Modules that share their names. Remove an entry when you give one of its modules another name.
SHARED_MODULES = {
    *("app", "deployment", "events"),
    *("generation", "lane", "peers", "policy", "priority"),
    *("protocol", "pulls", "records", "replica", "router", "server"),
}


def shared(names: list[str]) -> set[str]:
    return {name for name, count in Counter(names).items() if count > 1}


def test_no_two_classes_have_the_same_name() -> None:
    trees = [ast.parse(module.read_text()) for module in product_modules()]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    assert shared([node.name for node in nodes if isinstance(node, ast.ClassDef)]) == set()


def test_no_more_modules_have_the_same_name() -> None:
    modules = [module.stem for module in product_modules() if module.stem != "__init__"]
    assert shared(modules) == SHARED_MODULES
