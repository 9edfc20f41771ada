"""A tenant declares as many prefixes, and pins as many blocks, as its limits allow."""

from collections.abc import Mapping

import numpy as np
import pytest

from kvroute.features.prefixes.declarations import check_limits
from kvroute.features.prefixes.named_prefix import Prefix
from kvroute.router.api.errors import ApiError

BLOCK = 4


def prefix(id_: str, blocks: int, *, tenant: str = "acme", version: int = 1) -> Prefix:
    tokens = np.zeros(blocks * BLOCK + 1, np.uint32)
    return Prefix(id_, version, tokens, {"prompt": "x"}, tenant=tenant)


DECLARED = (
    prefix("law", 3),
    prefix("law", 4, version=2),
    prefix("tax", 5),
    prefix("big", 90, tenant="other"),
    prefix("old", 90, tenant=""),
)


def check(wanted: Prefix, limits: Mapping[str, int]) -> None:
    check_limits(wanted, DECLARED, limits, block_size=BLOCK)


def test_a_tenant_may_declare_prefixes_up_to_its_limit_and_change_them() -> None:
    two = {"max_prefixes": 2}
    check(prefix("law", 900), two)
    with pytest.raises(ApiError, match=r"tenant acme may declare 2 prefixes.*number 3") as refused:
        check(prefix("new", 1), two)
    assert (refused.value.status, refused.value.param) == (409, "id")
    check(prefix("new", 1), {"max_prefixes": 3})
    check(prefix("new", 1, tenant="other"), two)
    check(prefix("new", 1), {})


def test_a_tenant_may_pin_blocks_up_to_its_limit_and_declare_more_unpinned() -> None:
    ten = {"max_pinned_blocks": 10}
    check(prefix("new", 1), ten)
    check(prefix("law", 5), ten)
    with pytest.raises(ApiError, match=r"would pin 11 KV blocks, but may pin only 10") as refused:
        check(prefix("new", 2), ten)
    assert (refused.value.status, refused.value.param) == (409, "pinned")
    unpinned = Prefix("new", 1, np.zeros(400, np.uint32), {}, is_pinned=False, tenant="acme")
    check(unpinned, ten)
