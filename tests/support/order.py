"""The order of a test run, and which tests must run in one process.

`make test` runs two processes (pytest-xdist). Each takes a room at a time where its tests share
clusters or engines, else a module. The rooms that take longest come first, so that both processes
end at about the same time.
"""

from collections import defaultdict
from pathlib import Path, PurePosixPath

import pytest
from xdist.scheduler import LoadScopeScheduling

ROOMS = ("cluster", "vllm", "own_cluster", "nodes", "redis", "unit")  # the longest first
SHARING = ("cluster", "vllm")
# Fixtures of these rooms, in the order in which their tests run.
SIMULATED = ("slow", "wired", "plain", "node", "trio", "named", "pair", "simulated_cluster")
SHARED_CLUSTERS = (*SIMULATED, "exact")


class Rooms(LoadScopeScheduling):
    """What a process takes at a time."""

    def _split_scope(self, nodeid: str) -> str:
        module = PurePosixPath(nodeid.partition("::")[0])
        return str(module.parent if module.parent.name in SHARING else module)


def fixtures_of(item: pytest.Item) -> set[str]:
    """The names of all fixtures that a test uses."""
    return {*item.fixturenames} if isinstance(item, pytest.Function) else set()


def put_in_order(items: list[pytest.Item]) -> None:
    """Modules that share clusters come in the order of the last cluster that they use."""
    last: defaultdict[Path, int] = defaultdict(int)
    for item in items:
        ranks = map(SHARED_CLUSTERS.index, fixtures_of(item).intersection(SHARED_CLUSTERS))
        last[item.path] = max(last[item.path], *ranks, 0)
    items.sort(key=lambda item: (ROOMS.index(item.path.parent.name), last[item.path]))
