"""The order of a test run, and which tests must run in one process.

`make test` and the parts of `make test-all` run two processes (pytest-xdist). Each process takes
one scope at a time: a folder whose tests share clusters or engines, else a module. The scopes that
take longest come first, so that both processes end at about the same time.
"""

from collections import defaultdict
from pathlib import Path, PurePosixPath

import pytest
from xdist.scheduler import LoadScopeScheduling

# Folders below tests/. Those that take longest are first. Folders that share clusters are adjacent.
FOLDERS = (
    *(
        "slow/clusters",
        "cluster",
        "slow/engines",
        "slow/bare_machine",
        "slow/image",
        "slow/clients",
        "vllm",
    ),
    *(
        "slow/own_cluster",
        "slow/versions",
        "slow/audit",
        "slow/suites",
        "slow/nodes",
        "redis",
        "slow/redis",
        "slow/replay",
        "slow/features",
        "features",
        "unit",
    ),
)
# Folder -> the scope that its modules share.
SHARING = {
    "slow/clusters": "simulated clusters",
    "cluster": "simulated clusters",
    "slow/engines": "engines",
    "slow/clients": "vLLM cluster",
    "vllm": "vLLM cluster",
    "slow/suites": "suites",
    "slow/image": "image",
}
# Fixtures of shared clusters and servers, in the order in which their tests run.
SIMULATED = ("slow", "wired", "plain", "node", "trio", "named", "pair", "simulated_cluster")
SHARED_CLUSTERS = (*SIMULATED, "vllm_cluster", "suite_cluster", "stock_url")


class Scopes(LoadScopeScheduling):
    """Assigns one scope at a time to a process."""

    def _split_scope(self, nodeid: str) -> str:
        module = PurePosixPath(nodeid.partition("::")[0])
        return SHARING.get(str(module.parent.relative_to("tests")), str(module))


def fixtures_of(item: pytest.Item) -> set[str]:
    """Return the names of all fixtures that a test uses."""
    return {*item.fixturenames} if isinstance(item, pytest.Function) else set()


def put_in_order(items: list[pytest.Item]) -> None:
    """Sort tests by folder, and a folder's modules by their last one of SHARED_CLUSTERS."""
    last: defaultdict[Path, int] = defaultdict(int)
    for item in items:
        ranks = map(SHARED_CLUSTERS.index, fixtures_of(item).intersection(SHARED_CLUSTERS))
        last[item.path] = max(last[item.path], *ranks, 0)
    items.sort(key=lambda item: (FOLDERS.index(folder_of(item)), last[item.path]))


def folder_of(item: pytest.Item) -> str:
    """Return the folder of a test below tests/, such as "slow/engines"; "features" for any."""
    folder = item.path.parent.relative_to(item.config.rootpath / "tests")
    return "features" if folder.parts[0] == "features" else str(folder)
