"""The order of a test run, and which tests must run in one process.

`make test` runs two processes (pytest-xdist). Tests that share a cluster or an engine form a group,
and so does each other module; a process takes a group at a time. Long groups come first, so that
both processes end at about the same time.
"""

from collections import defaultdict
from pathlib import Path

import pytest

# Fixtures of tests/cluster, in the order in which their tests run.
SHARED_CLUSTERS = ("slow", "wired", "plain", "node", "trio", "named", "pair", "simulated_cluster")
SHARED_ENGINE = "running"  # a fixture of tests/vllm
ROOMS = ("vllm", "cluster", "nodes", "redis", "unit")  # of modules that share nothing


def fixtures_of(item: pytest.Item) -> set[str]:
    """The names of all fixtures that a test uses."""
    return {*item.fixturenames} if isinstance(item, pytest.Function) else set()


def put_in_order(items: list[pytest.Item]) -> None:
    """Sorts the tests, and marks each with its group for pytest-xdist."""
    used: defaultdict[Path, set[str]] = defaultdict(set)
    for item in items:
        used[item.path] |= fixtures_of(item)
    items.sort(key=lambda item: _rank(item.path, used[item.path]))
    for item in items:
        item.add_marker(pytest.mark.xdist_group(_group(item.path, used[item.path])))


def _rank(module: Path, fixtures: set[str]) -> tuple[int, int]:
    """Modules that share clusters come in the order of the last cluster that they use."""
    shared = [SHARED_CLUSTERS.index(name) for name in fixtures.intersection(SHARED_CLUSTERS)]
    return (0, max(shared)) if shared else (1, ROOMS.index(module.parent.name))


def _group(module: Path, fixtures: set[str]) -> str:
    if fixtures.intersection(SHARED_CLUSTERS):
        return "clusters"
    return "engine" if SHARED_ENGINE in fixtures else f"{module.parent.name}/{module.stem}"
