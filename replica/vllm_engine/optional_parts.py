"""Parts of kvroute's engine that can be off while everything else works.

Each of them needs hooks of its own: those that hooks.txt lists for its modules. If one of these
does not fit the installed vLLM, only this part is off. If any other hook does not fit, replicas
run vLLM without any of kvroute's changes.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import NamedTuple

from kvroute.process import vllm_build
from kvroute.replica.vllm_engine.hooks import by_module, problems


class OptionalPart(NamedTuple):
    """A part that can be off."""

    name: str  # its name in sentences for users
    modules: tuple[str, ...]  # the modules with its hooks, or the beginnings of their names


HOST_MEMORY = OptionalPart(
    "host memory",
    ("host/connector.py", "host/copies.py", "host/events.py", "host/policy.py", "host/tier.py"),
)
SLOWER_TIERS = OptionalPart(
    "pulls from other replicas and the disk cache",
    ("host/spec.py", "host/peers.py", "host/disk.py", "host/disk_index.py", "host/block_facts.py"),
)
BATCH_LANE = OptionalPart("the lane of batch requests", ("core/lane.py",))
STEP_LIMITS = OptionalPart("limits of the time between tokens", ("core/step_limits.py",))
CONTINUATION = OptionalPart("continuing answers", ("core/continued.py",))
GRAMMARS = OptionalPart("several backends of grammars", ("grammar/backends.py",))
OPTIONAL_PARTS: Sequence[OptionalPart] = (
    HOST_MEMORY,
    SLOWER_TIERS,
    BATCH_LANE,
    STEP_LIMITS,
    CONTINUATION,
    GRAMMARS,
)


def is_on(part: OptionalPart) -> bool:
    """Return whether the part's hooks fit the installed vLLM."""
    return not misfit(part)


@cache
def misfit(part: OptionalPart) -> str:
    """Return why the part is off; empty: it is on."""
    return _problems(part.modules)


def misfits() -> dict[OptionalPart, str]:
    """Return the parts that are off -> why."""
    return {part: misfit(part) for part in OPTIONAL_PARTS if not is_on(part)}


def described(off: Mapping[OptionalPart, str], length: int) -> str:
    """Return a text that names all parts that are off, with as much of the reasons as fits.

    Args:
        off: Part -> why it is off.
        length: Maximum length of the text, in characters. All parts get the same share.
    """
    if not off:
        return ""
    share = length // len(off) - len("; ")
    return "; ".join(f"{part.name}: off, because {why}"[:share] for part, why in off.items())


@cache
def misfit_of_the_rest() -> str:
    """Return why kvroute's changes cannot be used at all; empty: they can."""
    optional = tuple(module for part in OPTIONAL_PARTS for module in part.modules)
    rest = [module for module in by_module() if not module.startswith(optional)]
    return _problems(tuple(rest))


def _problems(modules: tuple[str, ...]) -> str:
    if vllm_build.installed_version().startswith(vllm_build.TESTED):
        return ""  # the tests have compared all hooks with this version
    found = by_module().items()
    return "; ".join(
        problem
        for module, lines in found
        if module.startswith(modules)
        for problem in problems(lines)
    )
