"""Updates the list of vLLM's names and parameters that kvroute's engine uses.

`python -m tests.support.hooks` writes replica/vllm_engine/hooks.txt for the installed vLLM.
"""

import ast

from kvroute.replica.vllm_engine.hooks import LIST, GoneError, as_installed, name_of
from kvroute.replica.vllm_engine.replaced import (
    BEFORE_START,
    BEFORE_START_ON_CPU,
    IN_APPLICATION,
    IN_ENGINE,
)
from tests.support.documents import ROOT

ENGINE = ROOT / "replica" / "vllm_engine"
# A module that imports names which some versions of vLLM have elsewhere. These are not listed.
COMPAT = "compat.py"
REPLACED = (*IN_ENGINE, *BEFORE_START, *BEFORE_START_ON_CPU, *IN_APPLICATION)


def imported() -> set[str]:
    """Return all names of vLLM that the engine's modules import."""
    return {
        f"{node.module}.{alias.name}"
        for file in ENGINE.rglob("*.py")
        if file.name != COMPAT
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("vllm")
        for alias in node.names
    }


def replaced() -> set[str]:
    """Return the names that kvroute replaces in vLLM's modules and classes."""
    return {each.name.partition("[")[0] for each in REPLACED}


def rewritten() -> str:
    """Return the list with the parameters of the installed vLLM.

    A name that this vLLM no longer has keeps its line, with the mark GONE.
    """
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
