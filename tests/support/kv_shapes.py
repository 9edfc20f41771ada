"""Groups of KV caches as in real models, for vLLM's own managers (kv_managers.py)."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.support.kv_managers import Cache

Group = tuple[Any, ...]  # name of a function in kv_managers, and its arguments in tokens
# Name of a shape -> its groups, and options of kv_managers.Cache.
SHAPES: dict[str, tuple[list[Group], dict[str, Any]]] = {
    "plain": ([("full", 16)], {}),
    "large blocks": ([("full", 48)], {}),
    "windows": ([("window", 16, 40), ("full", 16), ("window", 16, 40)], {}),
    "wide windows": ([("full", 16), ("window", 32, 70)], {}),
    "narrow windows": ([("full", 64), ("window", 16, 20)], {}),
    "two windows": ([("full", 16), ("window", 16, 40), ("window", 16, 100)], {}),
    "one window": ([("window", 16, 40)], {}),
    "chunks": ([("full", 32), ("chunk", 32, 64)], {}),
    "states": ([("full", 32), ("state", 32), ("state", 32)], {}),
    "one state": ([("state", 32)], {}),
    "parts of states": ([("full", 64), ("state", 64)], {"hash_tokens": 16}),
    "pieces": ([("full", 32), ("state", 32)], {"step_tokens": 48}),
    "all": ([("full", 16), ("window", 16, 40), ("state", 16)], {"step_tokens": 33}),
}


def cache_of(shape: str, **own: Any) -> "Cache":
    """Return a cache with this shape. This imports vLLM."""
    from tests.support import kv_managers

    groups, options = SHAPES[shape]
    specs = [getattr(kv_managers, kind)(*sizes) for kind, *sizes in groups]
    return kv_managers.Cache(*specs, **(options | own))
