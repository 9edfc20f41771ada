"""Nodes are lost, and cut off, while fifty clients listen: none of them notices."""

import asyncio
import subprocess
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import psutil
import pytest
from openai import OpenAI

from tests.support.audience import Audience
from tests.support.clients import async_openai_client
from tests.support.hosts import Host
from tests.support.nodes import GPUS, ON_NODES, REPLICA_PROCESS, Nodes, ray_up
from tests.support.prometheus_server import prometheus
from tests.support.serving import KVROUTE, findings
from tests.support.untested import needs
from tests.support.waiting import until
from tests.support.workloads import ask, user

pytestmark = [*ON_NODES]

WORDS = 100  # in a prompt
REPLICAS = 3  # more than fit on one worker, fewer than on two
CUT_S = 20.0
SETTLED_S = 240.0  # Ray lets a lost node go after half a minute or more, and then looks for it


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    args = {"engine": "simulated", "simulated_decode_ms": 50, "replicas": REPLICAS}
    with ray_up(workers=2, args=args) as nodes:
        yield nodes


@asynccontextmanager
async def fifty_streams(nodes: Nodes) -> AsyncIterator[None]:
    """They last as long as the block, and hear what they hear when nothing happens."""
    async with async_openai_client(nodes.url, timeout_s=120) as client:
        undisturbed = await Audience(client, WORDS).listen()
        audience, over = Audience(client, WORDS), asyncio.Event()
        listening = asyncio.create_task(audience.listen_until(over))
        try:
            await until(lambda: min(audience.pieces) >= 5)
            yield
        finally:
            over.set()
            heard = await listening
    print(f"{sum(map(len, heard))} answers, longest pause {audience.longest_pause_s:.1f} s")
    for answer, answers in zip(undisturbed, heard, strict=True):
        assert set(answers) == {answer}


async def settle(nodes: Nodes, replicas: int) -> None:
    """Returns when so many run that the index and Serve know, and no others run or are known."""
    start = time.monotonic()
    while True:
        index, serving, running = await asyncio.to_thread(nodes.views)
        if index == serving and Counter(serving.values()) == running and len(index) == replicas:
            break
        assert time.monotonic() < start + SETTLED_S, f"{index=} {serving=} {running=}"
        await asyncio.sleep(0.5)
    print(f"{replicas} replicas after {time.monotonic() - start:.1f} s")


def busiest(nodes: Nodes) -> Host:
    """The worker with the most replicas."""
    ((address, _),) = Counter(nodes.index().values()).most_common(1)
    return nodes.worker(address)


def assert_hits_are_as_expected(nodes: Nodes) -> None:
    """What the routers believe the replicas to hold is what their engines find."""
    with OpenAI(base_url=f"{nodes.url}/v1", api_key="none", max_retries=0) as client:
        answers = [ask(client, user(f"{number} {'word ' * WORDS}")) for number in range(20)]
    found = [answer.cached_tokens for answer in answers]
    assert found == [answer.expected_tokens for answer in answers]
    assert any(found)


def test_replicas_run_on_both_workers(nodes: Nodes) -> None:
    assert set(nodes.index().values()) == {host.address for host in nodes.workers}


def test_the_doctor_warns_that_connections_between_nodes_are_not_encrypted(nodes: Nodes) -> None:
    command = [*KVROUTE, "doctor", "--json", "--url", nodes.url]
    examined = subprocess.run(command, capture_output=True, text=True, timeout=110)
    (check,) = (check for check in findings(examined) if check.name == "encryption")
    assert check.grade == "warning"
    assert f"to {REPLICAS} of {REPLICAS} replicas are not encrypted" in check.finding


def test_ray_exec_finds_our_command_on_the_head(nodes: Nodes) -> None:
    said = nodes.ray("exec", "kvroute status")
    assert all(replica in said for replica in nodes.index())


@needs("prometheus")
async def test_prometheus_reads_from_every_process_on_every_node(nodes: Nodes) -> None:
    with prometheus(nodes) as server:

        def read() -> set[str]:
            """Nodes with a process that tells its metrics; all that are known do."""
            targets = server.get("targets", state="active")["activeTargets"]
            found = [target["labels"] for target in targets if target["labels"]["job"] == "kvroute"]
            is_whole = all(target["health"] == "up" for target in targets) and len(found) > REPLICAS
            return {labels["node"] for labels in found} if is_whole else set()

        await until(lambda: read() == {host.address for host in nodes.hosts})


async def test_a_node_that_is_cut_off_for_a_while_is_used_again(nodes: Nodes) -> None:
    victim = busiest(nodes)
    async with fifty_streams(nodes):
        nodes.network.cut(victim)
        await asyncio.sleep(CUT_S)
        nodes.network.heal(victim)
        await settle(nodes, REPLICAS)
    assert_hits_are_as_expected(nodes)


async def test_a_node_that_is_lost_is_done_without_until_it_is_back(nodes: Nodes) -> None:
    victim = busiest(nodes)
    async with fifty_streams(nodes):
        victim.kill()
        await settle(nodes, GPUS)
        nodes.network.boot(victim)
        await settle(nodes, REPLICAS)
    assert_hits_are_as_expected(nodes)


async def test_rays_head_service_is_killed_and_starts_again(nodes: Nodes) -> None:
    """It also notices what happens later."""
    victim = busiest(nodes)
    async with fifty_streams(nodes):
        (service,) = named(nodes.head, "gcs_server")
        service.kill()
        await until(lambda: named(nodes.head, "gcs_server") not in ([], [service]), within_s=30)
        await settle(nodes, REPLICAS)
        running = [
            process for process in victim.processes() if process.name().startswith(REPLICA_PROCESS)
        ]
        running[0].kill()
        await until(lambda: len(nodes.index()) < REPLICAS, within_s=30)
        await settle(nodes, REPLICAS)
    assert_hits_are_as_expected(nodes)


def named(host: Host, name: str) -> list[psutil.Process]:
    return [
        process
        for process in host.processes()
        if process.name() == name and process.status() != "zombie"
    ]


async def test_ray_down_ends_the_head_at_once_and_its_workers_soon_after(nodes: Nodes) -> None:
    """The last one: the cluster is gone."""
    nodes.ray("down")
    await until(lambda: not rays(nodes.head), within_s=20)
    await until(lambda: not nodes.processes(), within_s=120)


def rays(host: Host) -> list[str]:
    """Ray's own processes there, and its workers."""
    names = [process.name() for process in host.processes()]
    return [name for name in names if name.startswith(("ray", "gcs_server"))]
