"""Each shared cluster runs until the last test that asks for it."""

from contextlib import ExitStack
from functools import cache

import pytest

from tests.support.order import SHARED_CLUSTERS, fixtures_of

stacks = {name: ExitStack() for name in SHARED_CLUSTERS}  # of this process


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """A hook of the rooms."""
    for name, last in _last_tests(item.session).items():
        if last is item:
            stacks[name].close()


@cache
def _last_tests(session: pytest.Session) -> dict[str, pytest.Item]:
    """By cluster."""
    return {name: item for item in session.items for name in fixtures_of(item) & stacks.keys()}
