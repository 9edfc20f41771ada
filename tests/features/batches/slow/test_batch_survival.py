"""Each line of a batch has exactly one result, whatever is killed while the batch runs."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
from openai import OpenAI

from tests.support.batches import assert_complete, completed, create, is_final, questions, runs_in
from tests.support.clients import openai_client
from tests.support.serving import (
    READY,
    START_S,
    Cluster,
    kill_at_once,
    launched,
    redis_of,
    start_cluster,
)
from tests.support.waiting import wait_until

LINES = 400
MANY_LINES = 4000  # a batch that has not ended when all processes of the cluster have been found
OPTIONS = (
    *("--engine", "simulated", "--replicas", "2", "--routers", "2", "--cluster", "batches"),
    *("--simulated-prefill-tokens-per-s", "20000", "--simulated-decode-ms", "1"),
)


@contextmanager
def running(folder: Path) -> Iterator[tuple[Cluster, OpenAI]]:
    options = (*OPTIONS, "--files-dir", str(folder))
    with start_cluster(*options) as cluster, openai_client(cluster) as client:
        yield cluster, client


def new_batch(client: OpenAI, lines: int = LINES) -> str:
    return create(client, questions(client.models.list().data[0].id, lines)).id


def ends(client: OpenAI, batch: str, lines: int = LINES) -> None:
    wait_until(lambda: is_final(client, batch), within_s=START_S)
    assert_complete(client, batch, lines)


@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP])
def test_another_router_goes_on(tmp_path: Path, blow: signal.Signals) -> None:
    """A router that was stopped goes on later, and its results do not count then."""
    with running(tmp_path) as (cluster, client):
        batch, struck = new_batch(client), list[psutil.Process]()
        for share in (0.2, 0.4, 0.6):
            wait_until(lambda: completed(client, batch) >= share * LINES)  # noqa: B023
            before = runs_in(tmp_path, batch)
            wait_until(lambda: unstruck(cluster, struck))
            victim = unstruck(cluster, struck)[0]
            victim.send_signal(blow)
            go_on(struck)
            struck.append(victim)
            wait_until(lambda: runs_in(tmp_path, batch) > before or is_final(client, batch))  # noqa: B023
        go_on(struck)
        ends(client, batch)


def unstruck(cluster: Cluster, struck: list[psutil.Process]) -> list[psutil.Process]:
    return [router for router in cluster.routers() if router not in struck]


def go_on(processes: list[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGCONT)


def test_a_batch_goes_on_after_the_whole_cluster_was_killed(tmp_path: Path) -> None:
    options = (*OPTIONS, "--files-dir", str(tmp_path))
    with launched(*options) as cluster, openai_client(cluster) as client:
        cluster.wait_for(READY)
        batch = new_batch(client, MANY_LINES)
        wait_until(lambda: completed(client, batch) >= MANY_LINES // 10)
        kill_at_once(cluster.processes())
    with running(tmp_path) as (_, client):
        ends(client, batch, MANY_LINES)
        assert runs_in(tmp_path, batch) == 2


def test_a_batch_goes_on_while_redis_loses_its_data_and_a_replica_dies(tmp_path: Path) -> None:
    with running(tmp_path) as (cluster, client):
        batch = new_batch(client)
        wait_until(lambda: completed(client, batch) >= LINES // 5)
        redis_of(cluster).flushall()
        wait_until(lambda: completed(client, batch) >= 2 * LINES // 5)
        cluster.titled("kvroute:Replica")[0].kill()
        ends(client, batch)
