"""A container's share of memory is a share of what it may take."""

from pathlib import Path

import psutil
import pytest

from kvroute.process.memory import memory_bytes

TOTAL = psutil.virtual_memory().total


@pytest.mark.parametrize("name", ["memory.max", "memory/memory.limit_in_bytes"])
@pytest.mark.parametrize(
    ("limit", "found"), [("1000000", 1_000_000), ("max", TOTAL), (f"{2**63 - 4096}", TOTAL)]
)
def test_a_containers_limit_counts_where_it_is_below_the_nodes_memory(
    tmp_path: Path, name: str, limit: str, found: int
) -> None:
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    file.write_text(f"{limit}\n")
    assert memory_bytes(tmp_path) == found


def test_without_a_container_it_is_the_nodes_memory(tmp_path: Path) -> None:
    assert memory_bytes(tmp_path) == TOTAL
