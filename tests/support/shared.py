"""Clusters that several test modules share. Each runs until the last test that uses it ends."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import cache

import pytest

from tests.support.order import SHARED_CLUSTERS, fixtures_of
from tests.support.serving import COMMAND, STOP_S, Cluster, start_cluster

stacks = {name: ExitStack() for name in SHARED_CLUSTERS}  # closing one stops the cluster


def shared_cluster(
    name: str,
    *args: str,
    env: Mapping[str, str] | None = None,
    command: Sequence[str] = COMMAND,
    stop_s: float = STOP_S,
) -> Iterator[Cluster]:
    """Start the shared cluster of this name. A session-scoped fixture yields from this."""
    with stacks[name] as stack:
        cluster = start_cluster(*args, env=env, command=command, stop_s=stop_s)
        yield stack.enter_context(cluster)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Stop each shared cluster after its last test. This is a hook of pytest."""
    for name, last in _last_tests(item.session).items():
        if last is item:
            stacks[name].close()


@cache
def _last_tests(session: pytest.Session) -> dict[str, pytest.Item]:
    """Return the last test of each shared cluster."""
    return {name: item for item in session.items for name in fixtures_of(item) & stacks.keys()}
