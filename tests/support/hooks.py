"""What kvroute uses of vLLM that vLLM may change: `python -m tests.support.hooks` writes the list
anew, as the installed vLLM has it.

It needs none of our engine's modules, which may not even be importable then. Two of vLLM's
functions are named by where ours keep them, since others take their places.
"""

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.support.documents import ROOT

LIST = Path(__file__).with_name("hooks.txt")
ENGINE = ROOT / "replica" / "vllm_engine"
ALL = ".*"  # behind a class: its public names


class GoneError(LookupError):
    """There is nothing of that name."""


def listed() -> list[str]:
    """The hooks of the pinned version: names, functions with their parameters."""
    return [line.strip() for line in LIST.read_text().splitlines() if line.startswith(" ")]


def imported() -> set[str]:
    """All names of vLLM that the engine's modules import.

    Without those of compat.py, which are elsewhere in some versions.
    """
    return {
        f"{node.module}.{alias.name}"
        for file in ENGINE.rglob("*.py")
        if file.name != "compat.py"
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("vllm")
        for alias in node.names
    }


def replaced() -> set[str]:
    """Those that they replace in vLLM's modules."""
    tree = ast.parse((ENGINE / "http" / "repeatable.py").read_text())
    (names,) = (
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "REPLACED"
    )
    return {f"{module}.{name}" for module, names in names.items() for name in names}


def name_of(hook: str) -> str:
    return re.split(r"[(:]", hook)[0]


def as_installed(name: str) -> str:
    """The hook of that name. GoneError."""
    if name.endswith(ALL):
        members = vars(_found(name.removesuffix(ALL)))
        return f"{name}: {', '.join(sorted(member for member in members if member[0] != '_'))}"
    thing = _found(name)
    if not (inspect.isfunction(thing) or inspect.ismethod(thing)):
        return name
    return f"{name}({', '.join(inspect.signature(thing).parameters)})"


def _found(name: str) -> Any:
    """None for an attribute that only instances have."""
    parts = name.split(".")
    for depth in range(len(parts), 0, -1):
        try:
            thing: Any = importlib.import_module(".".join(parts[:depth]))
        except (ImportError, AttributeError):  # ours, too, want something of vLLM
            continue
        for number, part in enumerate(parts[depth:], start=depth + 1):
            if not hasattr(thing, part):
                if number == len(parts) and _instances_have(thing, part):
                    return None
                raise GoneError(name)
            thing = getattr(thing, part)
        return thing
    raise GoneError(name)


def _instances_have(kind: Any, name: str) -> bool:
    return inspect.isclass(kind) and any(
        re.search(rf"\bself\.{name}\b\s*[:=,]|^    {name}:", source, re.MULTILINE)
        for source in _sources(kind)
    )


def _sources(kind: type) -> Iterator[str]:
    for each in kind.__mro__:
        if each.__module__.partition(".")[0] in ("vllm", "fastapi"):
            yield inspect.getsource(each)


def rewritten() -> str:
    """The list as the installed vLLM has it; what is gone stays as it was."""
    lines = []
    for line in LIST.read_text().splitlines():
        if line.startswith(" "):
            try:
                line = "    " + as_installed(name_of(line.strip()))
            except GoneError:
                line += "  # GONE"
        lines.append(line)
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    LIST.write_text(rewritten())
