from kvroute.contract.records import EngineFacts
from kvroute.replica.engine.pins import pin_budget, room_for_pin


def test_pins_take_their_share_but_leave_room_for_a_longest_request() -> None:
    def budget(share: float, max_model_len: int) -> int:
        return pin_budget(share, capacity_blocks=100, block_size=32, max_model_len=max_model_len)

    assert budget(0.3, max_model_len=32) == 30
    assert budget(0.3, max_model_len=70 * 32) == 30
    assert budget(0.3, max_model_len=70 * 32 + 1) == 29
    assert budget(1.0, max_model_len=60 * 32) == 40
    assert budget(1.0, max_model_len=200 * 32) == 0
    assert budget(0.0, max_model_len=32) == 0


def test_a_pin_may_take_what_others_leave_and_what_it_has() -> None:
    facts = EngineFacts(32, 100, 2048, 1000.0, pin_blocks=30)
    assert room_for_pin("a", {"a": 10, "b": 12}, facts) == 18
    assert room_for_pin("c", {"a": 10, "b": 12}, facts) == 8
