"""The limits of pins, and the blocks that pins hold."""

from types import SimpleNamespace
from typing import cast

from hypothesis import given
from hypothesis import strategies as st

from kvroute.blocks.tiers import HOST
from kvroute.contract.records import EngineFacts, TierFacts
from kvroute.replica.engine.pins import PinnedKeys, free_pin_blocks, pin_budget
from kvroute.replica.engine.protocol import Engine


def test_the_limit_of_pins_leaves_enough_blocks_for_the_longest_request() -> None:
    def budget(share: float, max_model_len: int) -> int:
        return pin_budget(share, capacity_blocks=100, block_size=32, max_model_len=max_model_len)

    assert budget(0.3, max_model_len=32) == 30
    assert budget(0.3, max_model_len=70 * 32) == 30
    assert budget(0.3, max_model_len=70 * 32 + 1) == 29
    assert budget(1.0, max_model_len=60 * 32) == 40
    assert budget(1.0, max_model_len=200 * 32) == 0
    assert budget(0.0, max_model_len=32) == 0


def test_a_pin_may_take_the_free_blocks_and_its_own_earlier_blocks() -> None:
    engine = engine_with({"a": 10, "b": 12}, host=None)
    assert free_pin_blocks("a", engine) == 18
    assert free_pin_blocks("c", engine) == 8


def test_host_memory_has_a_separate_limit_of_pins() -> None:
    engine = engine_with({"a": 30}, host=TierFacts(1000, 1, 1.0, pin_blocks=300))
    assert free_pin_blocks("b", engine) == 0
    assert free_pin_blocks("b", engine, HOST) == 100
    assert free_pin_blocks("b", engine_with({}, host=None), HOST) <= 0


def engine_with(pins: dict[str, int], host: TierFacts | None) -> Engine:
    """Return an engine with a pin of 200 blocks in host memory, and room for 30 in its own."""
    facts = EngineFacts(32, 100, 2048, 1000.0, pin_blocks=30, host=host)
    return cast(Engine, SimpleNamespace(facts=facts, pins=pins, host_pins={"h": 200}))


@given(st.lists(st.tuples(st.sampled_from("abc"), st.lists(st.integers(0, 9), unique=True))))
def test_a_block_is_pinned_as_long_as_one_of_its_pins(changes: list[tuple[str, list[int]]]) -> None:
    pinned, expected, pins = PinnedKeys[int](), set[int](), dict[str, list[int]]()
    for name, keys in changes:
        begun, over = pinned.change(name, keys)
        pins[name] = keys
        assert not expected & {*begun}
        assert expected >= {*over}
        expected = (expected | {*begun}) - {*over}
        assert expected == {key for pin in pins.values() for key in pin}
        assert all((key in pinned) == (key in expected) for key in range(10))
