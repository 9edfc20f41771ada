"""A tenant's limits for named prefixes: how many it may declare, and how many blocks it may pin."""

from collections.abc import Iterable, Mapping

from kvroute.features.prefixes import TENANT_HAS_TOO_MANY, TENANT_PINS_TOO_MUCH
from kvroute.features.prefixes.named_prefix import Prefix
from kvroute.router.api.errors import ApiError


def check_limits(
    wanted: Prefix, declared: Iterable[Prefix], limits: Mapping[str, int], *, block_size: int
) -> None:
    """Check that a tenant may declare a prefix.

    Older versions of the prefix do not count, since the new version replaces them.

    Args:
        wanted: the prefix to declare.
        declared: all prefixes that are declared already.
        limits: the limits of the caller.

    Raises:
        ApiError: the tenant has too many prefixes or pinned blocks.
    """
    own = {prefix.id: prefix for prefix in declared if prefix.tenant == wanted.tenant}
    own[wanted.id] = wanted
    _check_number(wanted, len(own), limits.get("max_prefixes"))
    blocks = sum(prefix.full_blocks(block_size) for prefix in own.values() if prefix.is_pinned)
    _check_blocks(wanted, blocks, limits.get("max_pinned_blocks"))


def _check_number(wanted: Prefix, number: int, limit: int | None) -> None:
    if limit is None or number <= limit:
        return
    raise ApiError(
        409,
        f"tenant {wanted.tenant} may declare {limit} prefixes, and {wanted.label!r} would be "
        f"number {number}; drop one with DELETE /v1/prefixes/ID",
        param="id",
        code=TENANT_HAS_TOO_MANY,
    )


def _check_blocks(wanted: Prefix, blocks: int, limit: int | None) -> None:
    if limit is None or not wanted.is_pinned or blocks <= limit:
        return
    raise ApiError(
        409,
        f"with prefix {wanted.label!r}, tenant {wanted.tenant} would pin {blocks} KV blocks, but "
        f'may pin only {limit}; drop a prefix, or send "pinned": false for one that may be evicted',
        param="pinned",
        code=TENANT_PINS_TOO_MUCH,
    )
