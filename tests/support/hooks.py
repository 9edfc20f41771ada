"""The list hooks.txt: parts of vLLM that kvroute uses and that vLLM may change.

`python -m tests.support.hooks` updates the list for the installed vLLM. This works even if
kvroute's own modules cannot be imported with that version. Some of vLLM's functions are listed by
the name under which a module of kvroute keeps them, because kvroute replaces them in vLLM.
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
ALL = ".*"  # after the name of a class: the hook lists all public names of the class


class GoneError(LookupError):
    """The installed vLLM has nothing with this name."""


def listed() -> list[str]:
    """Return the hooks of the pinned version: names, and for functions their parameters."""
    return [line.strip() for line in LIST.read_text().splitlines() if line.startswith(" ")]


def imported() -> set[str]:
    """Return all names of vLLM that the engine's modules import."""
    return {
        f"{node.module}.{alias.name}"
        for file in ENGINE.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("vllm")
        for alias in node.names
    }


def replaced() -> set[str]:
    """Return the names in vLLM's modules that http/repeatable.py replaces."""
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
    """Return the hook with this name, as in the installed vLLM. Raises GoneError."""
    if name.endswith(ALL):
        members = vars(_found(name.removesuffix(ALL)))
        return f"{name}: {', '.join(sorted(member for member in members if member[0] != '_'))}"
    thing = _found(name)
    if not (inspect.isfunction(thing) or inspect.ismethod(thing)):
        return name
    return f"{name}({', '.join(inspect.signature(thing).parameters)})"


def _found(name: str) -> Any:
    """Return the object with this name; None for an attribute that only instances have."""
    parts = name.split(".")
    for depth in range(len(parts), 0, -1):
        try:
            thing: Any = importlib.import_module(".".join(parts[:depth]))
        except (ImportError, AttributeError):  # modules of kvroute import vLLM, too
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
    for base in kind.__mro__:
        if base.__module__.partition(".")[0] in ("vllm", "fastapi"):
            yield inspect.getsource(base)


def rewritten() -> str:
    """Return the list for the installed vLLM. Hooks that no longer exist are marked."""
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
