"""Which waiting batch request is sent next, and to which replica."""

from collections.abc import Sequence

from kvroute.blocks.fingerprint import Fingerprint
from kvroute.prefill.speed import PrefillModel
from kvroute.router.placement.attempts import Placement
from kvroute.router.placement.load import PendingRequest, ReplicaLoad
from kvroute.router.placement.loads import LaneRoom, ReplicaCapacity
from kvroute.router.placement.policy import Candidate
from kvroute.router.queueing.lane import PLACED, Lane
from tests.support.placements import anywhere, ranked

UNIT_S = 2.0  # the fleet's unit of time


def lane_of(**requests: Sequence[Candidate]) -> Lane[str]:
    """Return a lane with these requests; those without a ranking can go anywhere."""
    lane = Lane[str](lambda: UNIT_S)
    for order_s, (name, ranking) in enumerate(requests.items()):
        lane.add(name, order_s, _ranks(ranking) if ranking else anywhere)
    return lane


def _ranks(ranking: Sequence[Candidate]):  # type: ignore[no-untyped-def]
    def place(ids: Sequence[str], now_s: float) -> Placement:
        return ranked(*ranking)

    return place


def replica(name: str, *, pending: int = 0, limit: int = 1000, kv: float = 1e6) -> ReplicaCapacity:
    """Return a replica with room for prompts of up to `limit` tokens, of which some are taken."""
    load = ReplicaLoad(PrefillModel(1000.0, 1e6))
    if pending:
        load.send("r", PendingRequest(1.0, new_tokens=pending, prompt_tokens=pending, sent_s=0.0))
    return ReplicaCapacity(name, 0.0, lane=LaneRoom(load, kv, limit, 1e6))


def on(name: str, *, hit: int = 0) -> Candidate:
    return Candidate(name, hit, 0.0, 1.0)


def test_requests_leave_in_their_order_while_replicas_have_room() -> None:
    lane = lane_of(first=(), second=())
    assert lane.pop_next([replica("a", pending=1000)], 0.0) is None
    assert lane.pop_next([replica("a", pending=1000), replica("b")], 0.0) == ("first", "b")
    assert [*lane] == ["second"]


def test_a_request_waits_for_the_replica_that_has_its_prompt_and_later_ones_pass() -> None:
    lane = lane_of(cached=(on("a", hit=5), on("b")), other=())
    full, free = replica("a", pending=1000), replica("b")
    assert lane.pop_next([full, free], 0.0) == ("other", "b")
    assert lane.pop_next([full, free], 0.0) is None
    assert lane.pop_next([replica("a"), free], 0.0) == ("cached", "a")


def test_a_request_does_not_wait_if_another_replica_costs_less() -> None:
    lane = lane_of(cached=(on("b"), on("a", hit=5)))
    assert lane.pop_next([replica("a"), replica("b")], 0.0) == ("cached", "b")


def test_a_request_that_waits_for_a_replica_is_placed_again_after_a_time() -> None:
    ranking = [on("a", hit=5), on("b")]
    lane = lane_of(cached=ranking)
    replicas = [replica("a", pending=1000), replica("b")]
    assert lane.pop_next(replicas, 0.0) is None
    ranking[0] = on("a")  # it has evicted the prompt
    assert lane.pop_next(replicas, 0.9 * PLACED * UNIT_S) is None
    assert lane.pop_next(replicas, PLACED * UNIT_S) == ("cached", "b")


def test_a_later_request_does_not_take_the_room_for_which_an_earlier_one_waits() -> None:
    lane = lane_of(large=(), small=())
    half = replica("a", pending=950)
    assert lane.pop_next([half], 0.0) is None
    assert half.lane is not None
    half.lane.lane.finish("r")
    assert lane.pop_next([half], 0.0) == ("large", "a")


def test_a_replica_without_batch_requests_takes_one_of_any_size() -> None:
    assert replica("a", limit=1, kv=1).lane.fits(  # type: ignore[union-attr]
        new_tokens=5000, cached_tokens=0, prefix=None
    )


def test_the_blocks_of_a_request_are_counted_once_if_a_later_one_shares_them() -> None:
    load = ReplicaLoad(PrefillModel(1000.0, 1e6))
    blocks = tuple(Fingerprint(number) for number in range(1, 11))
    first = PendingRequest(1.0, new_tokens=160, prompt_tokens=160, sent_s=0.0, blocks=blocks)
    load.send("first", first)
    shared = blocks[7]
    assert load.kv.needed(new_tokens=32, cached_tokens=128, prefix=shared) == 192
    second = PendingRequest(1.0, new_tokens=32, prompt_tokens=160, sent_s=0.0, prefix=shared)
    load.send("second", second)
    assert load.kv.tokens == 192
    load.finish("first")
    assert load.kv.tokens == 160
    load.finish("second")
    assert load.kv.tokens == 0
