"""What `kvroute drain` refuses, and what it says while it waits."""

import pytest

from kvroute.controller.drain import DrainError, check_can_drain, describe

HEAD = {"NodeID": "a", "Alive": True, "Resources": {"CPU": 8, "node:__internal_head__": 1.0}}
WORKER = {"NodeID": "b", "Alive": True, "Resources": {"GPU": 1}}
LOST = {"NodeID": "c", "Alive": False, "Resources": {}}


def test_a_worker_can_be_emptied() -> None:
    check_can_drain("b", [HEAD, WORKER, LOST])


def test_the_head_cannot() -> None:
    with pytest.raises(DrainError, match="head"):
        check_can_drain("a", [HEAD, WORKER])


def test_nor_can_the_only_machine() -> None:
    with pytest.raises(DrainError, match="only machine"):
        check_can_drain("b", [WORKER, LOST])


def test_the_processes_that_are_left_are_counted_by_kind() -> None:
    assert describe(["replica", "router", "replica"]) == "2 replicas and 1 router left"
    assert describe([]) == "no replica and no router is left"
