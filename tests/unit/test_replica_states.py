"""Every view of a fleet has the states of its replicas from one function."""

import asyncio
import threading
from collections.abc import Mapping

import pytest
from ray.serve._private.common import DeploymentStatus, DeploymentStatusTrigger, ReplicaState
from ray.serve.schema import DeploymentDetails, DeploymentSchema, ReplicaDetails

from kvroute.router.connections.deployed import DeployedReplicas
from kvroute.router.connections.replica_source import Deployed, NoReplicaError
from kvroute.router.connections.replica_states import ReplicaStates, combine
from kvroute.router.connections.serve_source import deployed


def of_two(in_serve: Mapping[str, str] | None, connected: str = "ab", **more: str) -> ReplicaStates:
    """Return the states of a fleet of a and b; `more` has ids of one letter."""
    names = ("indexed", "running", "known", "trusted", "degraded")
    sets = {name: [*more.get(name, "" if name == "degraded" else connected)] for name in names}
    listed = in_serve and Deployed(2, in_serve, frozenset(more.get("ended", "")))
    return combine(listed or None, connected=[*connected], **sets)


RUNNING = {"a": "RUNNING", "b": "RUNNING"}
STATES = {
    "all are well": (of_two(RUNNING), 2, {}),
    "b was killed, and Serve does not know it yet": (
        of_two(RUNNING, "a", indexed="ab", running="ab", known="ab"),
        1,
        {"b": "lost"},
    ),
    "Serve has started c in place of b, whose record is still in the index": (
        of_two({"a": "RUNNING", "c": "STARTING"}, "a", indexed="ab", ended="b"),
        1,
        {"c": "starting"},
    ),
    "c is in the index, and Serve has not announced it": (
        of_two({"a": "RUNNING", "c": "STARTING"}, "a", indexed="ac"),
        1,
        {"c": "starting"},
    ),
    "Serve has announced c, and the router connects to it": (
        of_two({"a": "RUNNING", "c": "RUNNING"}, "a", indexed="ac", running="ac"),
        1,
        {"c": "starting"},
    ),
    "Serve has removed c after `kvroute scale`, and still announces it": (
        of_two(RUNNING, indexed="abc", running="abc", known="ab"),
        2,
        {},
    ),
    "b does not answer": (of_two(RUNNING, trusted="a"), 1, {"b": "silent"}),
    "b has another tokenizer": (of_two(RUNNING, degraded="b"), 2, {}),
    "c drains, and is not wanted": (of_two(RUNNING | {"c": "STOPPING"}, indexed="abc"), 2, {}),
    "c belongs to another deployment": (of_two(RUNNING, indexed="abc"), 2, {}),
    "Serve's controller does not answer": (
        of_two(None, "a", indexed="ab", running="ab", known="ab"),
        1,
        {"b": "lost"},
    ),
}


@pytest.mark.parametrize(("states", "ready", "missing"), STATES.values(), ids=STATES)
def test_missing_replicas_are_named_with_their_state(
    states: ReplicaStates, ready: int, missing: dict[str, str]
) -> None:
    assert (states.ready, states.missing) == (ready, missing)


def test_replicas_that_are_not_missing_have_a_state_too() -> None:
    seen = of_two(RUNNING | {"c": "STOPPING"}, indexed="abcd", degraded="b").by_id
    assert seen == {"a": "ready", "b": "degraded", "c": "leaving", "d": "elsewhere"}


def test_the_ranks_of_a_replica_count_as_one() -> None:
    ranks = ["a.0", "a.1"]
    same = dict.fromkeys(("indexed", "running", "known", "connected", "trusted"), ranks)
    states = combine(Deployed(1, {"a": "RUNNING"}, frozenset()), degraded=[], **same)
    assert (states.ready, states.by_id) == (1, {"a.0": "ready", "a.1": "ready"})


def test_what_serve_reports_of_a_deployment_is_understood() -> None:
    def replica(id_: str, state: ReplicaState) -> ReplicaDetails:
        return ReplicaDetails(actor_name=id_, replica_id=id_, state=state, start_time_s=1.0)

    details = DeploymentDetails(
        name="Replica",
        status=DeploymentStatus.UNHEALTHY,
        status_trigger=DeploymentStatusTrigger.UNSPECIFIED,
        message="",
        deployment_config=DeploymentSchema(name="Replica"),
        target_num_replicas=2,
        required_resources={},
        replicas=[replica("a", ReplicaState.RUNNING), replica("c", ReplicaState.STARTING)],
        recent_dead_replicas=[replica("b", ReplicaState.STOPPED)],
    )
    found = deployed([details.model_dump(exclude_unset=True)])
    assert found == Deployed(2, {"a": "RUNNING", "c": "STARTING"}, frozenset("b"))


async def test_a_controller_that_hangs_is_asked_once_and_delays_only_the_first() -> None:
    goes_on, questions = threading.Event(), list[int]()

    def read() -> Deployed:
        questions.append(1)
        goes_on.wait()
        return Deployed(2, RUNNING, frozenset())

    replicas = DeployedReplicas(read)
    assert [await replicas.get() for _ in range(3)] == [None, None, None]
    goes_on.set()
    async with asyncio.timeout(30):
        while (answer := await replicas.get()) is None:
            await asyncio.sleep(0.01)
    assert (answer.wanted, len(questions)) == (2, 1)


async def test_without_a_controller_the_number_of_wanted_replicas_is_unknown() -> None:
    def read() -> Deployed:
        raise NoReplicaError("no actor")

    assert await DeployedReplicas(read).get() is None
