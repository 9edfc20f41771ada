"""A tenant declares as many prefixes, and pins as many blocks, as its limits allow."""

from collections.abc import Iterable

from kvroute.keys.limits import TenantLimits
from kvroute.router.api.errors import ApiError
from kvroute.store.named_prefix import Prefix


def check_limits(
    wanted: Prefix, declared: Iterable[Prefix], limits: TenantLimits | None, *, block_size: int
) -> None:
    """Check that the tenant may have one more prefix.

    Older versions of it do not count: the new one takes their place.

    Raises:
        ApiError: the tenant has too many prefixes or pinned blocks.
    """
    if limits is None:
        return
    own = {each.id: each for each in declared if each.tenant == wanted.tenant}
    own[wanted.id] = wanted
    _check_number(wanted, len(own), limits.max_prefixes)
    blocks = sum(each.full_blocks(block_size) for each in own.values() if each.is_pinned)
    _check_blocks(wanted, blocks, limits.max_pinned_blocks)


def _check_number(wanted: Prefix, number: int, most: int | None) -> None:
    if most is None or number <= most:
        return
    raise ApiError(
        409,
        f"prefix {wanted.label!r} would be number {number} of tenant {wanted.tenant}, which may "
        f"declare {most}; drop one: DELETE /v1/prefixes/ID",
        param="id",
        code="tenant_prefixes_exceeded",
    )


def _check_blocks(wanted: Prefix, blocks: int, most: int | None) -> None:
    if most is None or not wanted.is_pinned or blocks <= most:
        return
    raise ApiError(
        409,
        f"with prefix {wanted.label!r}, tenant {wanted.tenant} would pin {blocks} KV blocks, and "
        f'may pin {most}; drop a prefix, or send "pinned": false for one that may be evicted',
        param="pinned",
        code="tenant_pins_exceeded",
    )
