"""Checks that the installed vLLM has the names and parameters that kvroute relies on.

hooks.txt lists these hooks: names in vLLM, and the parameters of functions. The list leaves out
names that are in different modules in some versions (compat.py), and functions and classes that
kvroute only uses through their documented interface.
"""

import importlib
import inspect
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

LIST = Path(__file__).with_name("hooks.txt")
ALL = ".*"  # a class in the list has this suffix, and then the public names that kvroute needs


class GoneError(LookupError):
    """The installed vLLM does not have this name."""


def listed() -> list[str]:
    """Return all hooks of hooks.txt."""
    return [hook for hooks in by_module().values() for hook in hooks]


def by_module() -> dict[str, list[str]]:
    """Return the hooks of hooks.txt by kvroute's module that relies on them."""
    hooks: dict[str, list[str]] = {}
    module = ""
    for line in LIST.read_text().splitlines():
        if line.startswith(" "):
            hooks[module].append(line.strip())
        elif not line.startswith("#"):
            module = line
            hooks.setdefault(module, [])
    return hooks


def name_of(hook: str) -> str:
    """Return a hook's name without its parameters."""
    return re.split(r"[(:]", hook)[0]


def problems(hooks: Iterable[str]) -> list[str]:
    """Return a message for each of these hooks that does not fit the installed vLLM."""
    messages = []
    for hook in hooks:
        try:
            installed = as_installed(name_of(hook))
        except GoneError:
            messages.append(f"{name_of(hook)} is gone")
        else:
            if not _fits(hook, installed):
                messages.append(f"{hook} is now {installed}")
    return messages


def as_installed(name: str) -> str:
    """Return the line that hooks.txt would have for this name in the installed vLLM.

    Raises:
        GoneError: The installed vLLM does not have the name.
    """
    if name.endswith(ALL):
        members = vars(_object(name.removesuffix(ALL)))
        return f"{name}: {', '.join(sorted(member for member in members if member[0] != '_'))}"
    thing = _object(name)
    if not (inspect.isfunction(thing) or inspect.ismethod(thing)):
        return name
    return f"{name}({', '.join(inspect.signature(thing).parameters)})"


def _fits(hook: str, installed: str) -> bool:
    """Return whether two lines for one name are equal; `installed` may have more public names."""
    name, colon, members = hook.partition(f"{ALL}: ")
    if not colon:
        return hook == installed
    return {*members.split(", ")} <= {*installed.removeprefix(name + colon).split(", ")}


def _object(name: str) -> Any:
    """Return the object with this name; None for an attribute that only instances have.

    Raises:
        GoneError: The installed vLLM does not have the name.
    """
    parts = name.split(".")
    for depth in range(len(parts), 0, -1):
        try:
            thing: Any = importlib.import_module(".".join(parts[:depth]))
        except (ImportError, AttributeError):  # AttributeError: a module of kvroute lacks a hook
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
    """Return whether the source of a class sets or declares this attribute of its instances."""
    return inspect.isclass(kind) and any(
        re.search(rf"\bself\.{name}\b\s*[:=,]|^    {name}:", source, re.MULTILINE)
        for source in _sources(kind)
    )


def _sources(kind: type) -> Iterator[str]:
    for base in kind.__mro__:
        if base.__module__.partition(".")[0] in ("vllm", "fastapi"):
            yield inspect.getsource(base)
