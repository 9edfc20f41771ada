"""A request takes its replicas in the order of its ranking, whatever becomes of them."""

from kvroute.router.dispatch.plans import DispatchPlan


def test_the_best_running_replica_comes_first() -> None:
    assert DispatchPlan(["a", "b", "c"]).next(["c", "b"]) == "b"


def test_a_replica_that_refused_is_not_asked_again() -> None:
    assert DispatchPlan(["a", "b"], refused={"a"}).next(["a", "b"]) == "b"


def test_a_replica_that_nobody_ranked_is_better_than_none() -> None:
    assert DispatchPlan(["a"], refused={"a"}).next(["a", "new"]) == "new"


def test_when_all_refused_there_is_nobody_to_ask() -> None:
    assert DispatchPlan(["a", "b"], refused={"a", "b"}).next(["a", "b"]) is None
    assert DispatchPlan(["a"]).next([]) is None
