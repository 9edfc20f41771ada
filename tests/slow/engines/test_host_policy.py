"""Which blocks host memory drops when there are some that it must not drop."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute.contract.keep import Order, RetentionHint

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own

BLOCKS = 12
names = st.sets(st.integers(0, BLOCKS - 1))


@given(
    orders=st.lists(st.sampled_from(Order), min_size=BLOCKS, max_size=BLOCKS),
    protected=names,
    busy=names,
    pinned=names,
    count=st.integers(1, BLOCKS),
)
def test_what_remains_is_in_the_order_it_was(
    orders: list[Order], protected: set[int], busy: set[int], pinned: set[int], count: int
) -> None:
    from vllm.v1.kv_offload.base import OffloadKey
    from vllm.v1.kv_offload.cpu.policies.base import ChunkStatus

    from kvroute.replica.vllm_engine.host.policy import RetentionPolicy

    policy = RetentionPolicy(BLOCKS)
    keys = [OffloadKey(bytes([number])) for number in range(BLOCKS)]
    for number, key in enumerate(keys):
        policy.insert(key, ChunkStatus(number))
        policy.record_use([key], RetentionHint(orders[number], session=1 + number // 4))
        policy.chunks[key].ref_cnt = int(number in busy)
        if number not in busy:
            policy.mark_evictable(key)
    policy.pin("law", [keys[number] for number in sorted(pinned)])
    before = list(policy._idle)
    evicted = policy.evict(count, {keys[number] for number in protected})
    gone = {chunk.chunk_id for _, chunk in evicted or ()}
    assert (evicted is None) == (count > BLOCKS - len(protected | busy | pinned))
    assert not gone & (protected | busy | pinned)
    assert gone == set([each for each in before if each not in protected][: len(gone)])
    assert list(policy._idle) == [n for n in before if n not in gone]
    policy.record_use(keys, RetentionHint())
    policy.touch(keys, None)
    for number in busy:  # its copy is over
        policy.chunks[keys[number]].ref_cnt = 0
        policy.mark_evictable(keys[number])
    assert not pinned & {*policy._idle}
    policy.pin("law", ())
    assert len(policy._idle) == len(policy.chunks) == BLOCKS - len(gone)
