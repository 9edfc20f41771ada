"""Features of kvroute's engine that can be off while everything else works.

Each of them needs hooks of its own: those that hooks.txt lists for its modules. If one of these
does not fit the installed vLLM, only this feature is off. If any other hook does not fit, replicas
run vLLM without any of kvroute's changes.
"""

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

from kvroute.process import vllm_build
from kvroute.replica.vllm_engine.hooks import by_module, problems


class EngineFeature(NamedTuple):
    """A feature that can be off."""

    name: str  # its name in sentences for users
    modules: tuple[str, ...]  # the modules with its hooks, or the beginnings of their names


HOST_MEMORY = EngineFeature(
    "host memory",
    ("host/connector.py", "host/copies.py", "host/events.py", "host/policy.py", "host/tier.py"),
)
SLOWER_TIERS = EngineFeature(
    "pulls from other replicas and the disk cache",
    ("host/spec.py", "host/peers.py", "host/disk.py", "host/disk_index.py", "host/block_facts.py"),
)
BATCH_LANE = EngineFeature("the lane of batch requests", ("core/lane.py",))
CONTINUATION = EngineFeature("continuing answers", ("core/continued.py",))
GRAMMARS = EngineFeature("several backends of grammars", ("grammar/backends.py",))
FEATURES: Sequence[EngineFeature] = (
    HOST_MEMORY,
    SLOWER_TIERS,
    BATCH_LANE,
    CONTINUATION,
    GRAMMARS,
)


def is_on(feature: EngineFeature) -> bool:
    """Return whether the feature's hooks fit the installed vLLM."""
    return not misfit(feature)


@cache
def misfit(feature: EngineFeature) -> str:
    """Return why the feature is off; empty: it is on."""
    return _problems(feature.modules)


def misfits() -> dict[EngineFeature, str]:
    """Return the features that are off -> why."""
    return {feature: misfit(feature) for feature in FEATURES if not is_on(feature)}


@cache
def misfit_of_the_rest() -> str:
    """Return why kvroute's changes cannot be used at all; empty: they can."""
    optional = tuple(module for feature in FEATURES for module in feature.modules)
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
