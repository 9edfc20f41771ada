"""Pulls between modelled replicas."""

import math
from dataclasses import replace

import pytest

from kvroute.replay.network import Network, PullInProgress
from kvroute.replay.simulate import Cluster, Outcome, simulate
from kvroute.replay.workload.trace import Request
from kvroute.replica.fabric.pull import LinkSpeed, Pull
from tests.support.conversations import conversations, request

LINK = LinkSpeed(bytes_per_s=1000.0, latency_s=1.0)
CLUSTER = Cluster(4, 200_000, host_tokens=400_000, link_gb_per_s=10.0)
TRACE = conversations()


def begin(
    network: Network, index: int, source: int, target: int, *, at_s: float, within_s: float = 1e6
) -> None:
    """Begin a pull of 10 blocks of 100 bytes: a second at full speed, after a second of latency."""
    asked = request(index, [*range(1, 11)])
    order = Pull(str(source), "", b"", asked.input_tokens, within_s)
    network.begin(asked, order, target, first_block=0, blocks=10, block_bytes=100, now_s=at_s)


def ends_s(network: Network) -> dict[int, float]:
    """Run the network alone, and return the time at which each request's pull ends."""
    ended: dict[int, float] = {}
    while (next_s := network.next_s) < math.inf:
        ended |= {transfer.request.index: next_s for transfer in network.end(next_s)}
    return ended


def ended(network: Network) -> list[PullInProgress]:
    transfers: list[PullInProgress] = []
    while (next_s := network.next_s) < math.inf:
        transfers += network.end(next_s)
    return transfers


def test_a_pull_takes_the_latency_and_its_bytes() -> None:
    network = Network(LINK)
    begin(network, 0, source=0, target=1, at_s=5.0)
    assert ends_s(network) == {0: pytest.approx(7.0)}


@pytest.mark.parametrize(("source", "target"), [(0, 2), (2, 1)])
def test_pulls_at_the_same_source_or_target_share_its_link(source: int, target: int) -> None:
    network = Network(LINK)
    begin(network, 0, source=0, target=1, at_s=0.0)
    begin(network, 1, source=source, target=target, at_s=0.0)
    assert ends_s(network) == {0: pytest.approx(3.0), 1: pytest.approx(3.0)}


def test_each_direction_has_its_own_bandwidth() -> None:
    network = Network(LINK)
    begin(network, 0, source=0, target=1, at_s=0.0)
    begin(network, 1, source=1, target=0, at_s=0.0)
    assert ends_s(network) == {0: pytest.approx(2.0), 1: pytest.approx(2.0)}


def test_a_late_pull_brings_the_blocks_that_have_arrived() -> None:
    network = Network(LINK)
    begin(network, 0, source=0, target=1, at_s=0.0, within_s=1.55)
    (transfer,) = ended(network)
    assert transfer.arrived == 5


def test_a_pull_that_is_complete_but_for_rounding_brings_its_last_block() -> None:
    network = Network(LinkSpeed(bytes_per_s=0.3e9, latency_s=0.002))
    order = Pull("0", "", b"", 10, 1e6)
    for index in range(7):
        asked = request(index, [*range(1, 11)])
        network.begin(
            asked, order, 1, first_block=0, blocks=10, block_bytes=67_108_864, now_s=0.1 * index
        )
    assert [transfer.arrived for transfer in ended(network)] == [10] * 7


def run(policy: str, cluster: Cluster = CLUSTER, trace: list[Request] = TRACE) -> Outcome:
    return simulate(trace, cluster, policy)


def test_replicas_pull_if_they_have_links() -> None:
    assert sum(run("kvroute").pulled_tokens) > 0
    assert sum(run("kvroute-always-pull").pulled_tokens) > 0
    assert sum(run("kvroute-never-pull").pulled_tokens) == 0


def test_without_links_or_host_memory_nothing_changes() -> None:
    never = run("kvroute-never-pull")
    assert run("kvroute", replace(CLUSTER, link_gb_per_s=0.0)) == never
    alone = replace(CLUSTER, host_tokens=0)
    assert run("kvroute", alone) == run("kvroute", replace(alone, link_gb_per_s=0.0))
