"""Clusters that several modules of a room share, each until no later test asks for it."""

from contextlib import ExitStack

import pytest

from tests.support.order import SHARED_CLUSTERS, fixtures_of

stacks = {name: ExitStack() for name in SHARED_CLUSTERS}  # of this process


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """A hook of the rooms: clusters that no later test asks for are stopped."""
    items = item.session.items
    wanted = set[str]().union(*map(fixtures_of, items[items.index(item) + 1 :]))
    for name in fixtures_of(item).intersection(SHARED_CLUSTERS) - wanted:
        stacks[name].close()
