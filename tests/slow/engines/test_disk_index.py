"""The index of the disk cache: its size is limited, and it evicts in the order of retention."""

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute.blocks.fingerprint import Fingerprint
from kvroute.contract.keep import Order, RetentionHint
from kvroute.replica.fabric.block_files import StoredBlock

if TYPE_CHECKING:
    from kvroute.replica.vllm_engine.host.disk_index import DiskIndex

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own

CAPACITY = 5


def index() -> "DiskIndex":
    from kvroute.replica.vllm_engine.host.disk_index import DiskIndex

    return DiskIndex(CAPACITY)


def blocks(*numbers: int) -> list[StoredBlock]:
    return [StoredBlock(key(number), Fingerprint(number)) for number in numbers]


def key(number: int) -> bytes:
    return number.to_bytes(4, "big")


def test_the_last_block_of_the_oldest_prompt_is_evicted_first() -> None:
    disk = index()
    assert disk.add(blocks(1, 2, 3)) == []
    assert disk.add(blocks(4, 5)) == []
    assert disk.add(blocks(6, 7)) == blocks(3, 2)
    disk.record_use([key(1)], RetentionHint())
    assert disk.add(blocks(8)) == blocks(5)


def test_blocks_of_ended_sessions_are_evicted_before_older_ones() -> None:
    disk = index()
    disk.add(blocks(1, 2))
    disk.add(blocks(3, 4))
    disk.record_use([key(3), key(4)], RetentionHint(Order.USUAL, session=7))
    disk.end(7)
    assert disk.add(blocks(5, 6, 7)) == blocks(4, 3)


def test_a_smaller_limit_evicts() -> None:
    disk = index()
    disk.add(blocks(1, 2, 3, 4))
    assert disk.set_limit(2) == blocks(4, 3)
    assert disk.add(blocks(5)) == blocks(2)
    assert disk.set_limit(100) == []
    assert disk.limit == CAPACITY


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("add"), st.lists(st.integers(0, 20), max_size=4, unique=True)),
            st.tuples(st.just("remove"), st.lists(st.integers(0, 20), max_size=3)),
            st.tuples(st.just("limit"), st.lists(st.integers(0, 9), min_size=1, max_size=1)),
            st.tuples(st.just("use"), st.lists(st.integers(0, 20), max_size=4, unique=True)),
        )
    )
)
def test_the_index_has_what_was_added_and_not_removed(
    steps: list[tuple[str, list[int]]],
) -> None:
    disk, model = index(), set[int]()
    for what, numbers in steps:
        match what:
            case "add":
                new = [number for number in numbers if number not in model][: disk.limit]
                evicted = disk.add(blocks(*new))
                model |= set(new)
                model -= {int(block.fingerprint) for block in evicted}
            case "remove":
                for number in numbers:
                    removed = disk.remove(key(number))
                    assert (removed is not None) == (number in model)
                    model.discard(number)
            case "limit":
                model -= {int(block.fingerprint) for block in disk.set_limit(numbers[0])}
            case "use":
                disk.record_use([key(number) for number in numbers], RetentionHint())
        assert disk.keys() == {key(number) for number in model}
        assert len(disk) == len(model) <= disk.limit
        assert all(disk.stored(key(number)) == blocks(number)[0] for number in model)
