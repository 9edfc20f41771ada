"""Checks that the installed vLLM has what kvroute's engine uses of it.

hooks.txt lists these hooks: names of vLLM, and for functions their parameters. compat.py has the
names that are elsewhere in some versions. Functions and classes of vLLM that kvroute only reads
through their documented interface are not listed.
"""

import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LIST = Path(__file__).with_name("hooks.txt")
ALL = ".*"  # behind a class: its public names


class GoneError(LookupError):
    """vLLM has nothing of this name."""


def listed() -> list[str]:
    """Return the hooks of the list: names, and functions with their parameters."""
    return [line.strip() for line in LIST.read_text().splitlines() if line.startswith(" ")]


def name_of(hook: str) -> str:
    """Return a hook's name without its parameters."""
    return re.split(r"[(:]", hook)[0]


def problems() -> list[str]:
    """Return the hooks that do not fit the installed vLLM, and why."""
    found = []
    for hook in listed():
        try:
            now = as_installed(name_of(hook))
        except GoneError:
            found.append(f"{name_of(hook)} is gone")
        else:
            if not _fits(hook, now):
                found.append(f"{hook} is now {now}")
    return found


def as_installed(name: str) -> str:
    """Return a hook as the installed vLLM has it. Raises GoneError."""
    if name.endswith(ALL):
        members = vars(_found(name.removesuffix(ALL)))
        return f"{name}: {', '.join(sorted(member for member in members if member[0] != '_'))}"
    thing = _found(name)
    if not (inspect.isfunction(thing) or inspect.ismethod(thing)):
        return name
    return f"{name}({', '.join(inspect.signature(thing).parameters)})"


def _fits(hook: str, now: str) -> bool:
    """Return whether a hook can be used as it is now. A class may have further public names."""
    name, colon, members = hook.partition(f"{ALL}: ")
    if not colon:
        return hook == now
    return {*members.split(", ")} <= {*now.removeprefix(name + colon).split(", ")}


def _found(name: str) -> Any:
    """Return the object of a name; None for an attribute that only instances have.

    Raises:
        GoneError: There is none.
    """
    parts = name.split(".")
    for depth in range(len(parts), 0, -1):
        try:
            thing: Any = importlib.import_module(".".join(parts[:depth]))
        except (ImportError, AttributeError):  # one of kvroute's own modules lacks a hook, too
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
