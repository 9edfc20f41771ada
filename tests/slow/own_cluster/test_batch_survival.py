"""Each line of a batch has exactly one result, whatever is killed while the batch runs."""

import json
import random
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from openai import APIError, OpenAI

from tests.support.clients import openai_client
from tests.support.serving import (
    READY,
    Cluster,
    kill_at_once,
    launched,
    redis_of,
    start_cluster,
)
from tests.support.waiting import wait_until

LINES = 400
OPTIONS = (
    *("--engine", "simulated", "--replicas", "2", "--routers", "2"),
    *("--simulated-prefill-tokens-per-s", "20000", "--simulated-decode-ms", "1"),
)
START_S = 200.0
FINAL = ("completed", "failed", "expired", "cancelled")


def options(folder: Path) -> tuple[str, ...]:
    return (*OPTIONS, "--files-dir", str(folder), "--cluster", "batches")


@contextmanager
def running(folder: Path) -> Iterator[tuple[Cluster, OpenAI]]:
    with start_cluster(*options(folder)) as cluster, openai_client(cluster) as client:
        yield cluster, client


def create(client: OpenAI) -> str:
    model = client.models.list().data[0].id
    lines = []
    for number in range(LINES):
        words = random.Random(number // 5).choices(range(1000), k=60)
        content = f"{' '.join(map(str, words))} {number}"
        body = {"model": model, "messages": [{"role": "user", "content": content}], "max_tokens": 2}
        line = {"custom_id": str(number), "method": "POST", "url": "/v1/chat/completions"}
        lines.append(json.dumps(line | {"body": body}))
    file = client.files.create(file=("in.jsonl", "\n".join(lines).encode()), purpose="batch")
    return client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
    ).id


def completed(client: OpenAI, batch: str) -> int:
    """Return the number of answered lines; -1 if the cluster does not answer at the moment."""
    try:
        counts = client.batches.retrieve(batch).request_counts
    except APIError:
        return -1
    return counts.completed if counts else 0


def is_final(client: OpenAI, batch: str) -> bool:
    try:
        return client.batches.retrieve(batch).status in FINAL
    except APIError:
        return False


def assert_complete(client: OpenAI, batch: str) -> None:
    wait_until(lambda: is_final(client, batch))
    found = client.batches.retrieve(batch)
    assert found.status == "completed"
    assert found.output_file_id is not None
    lines = client.files.content(found.output_file_id).text.splitlines()
    results = [json.loads(line) for line in lines]
    ids = [int(result["custom_id"]) for result in results]
    if found.error_file_id:
        lines = client.files.content(found.error_file_id).text.splitlines()
        failed = [json.loads(line) for line in lines]
        assert not failed, failed[:3]
    assert sorted(ids) == [*range(LINES)]
    assert found.request_counts is not None
    assert found.request_counts.model_dump() == {
        "total": LINES,
        "completed": LINES,
        "failed": 0,
    }


def runs_in(folder: Path, batch: str) -> int:
    return len([*(folder / "batches" / "batches" / batch).glob("run-*.json")])


@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP])
def test_another_router_goes_on(tmp_path: Path, blow: signal.Signals) -> None:
    """A router that was stopped goes on later, and its results do not count then."""
    with running(tmp_path) as (cluster, client):
        batch = create(client)
        stopped: list[psutil.Process] = []
        for share in (0.2, 0.4, 0.6):
            wait_until(lambda: completed(client, batch) >= share * LINES)  # noqa: B023
            before = runs_in(tmp_path, batch)
            for router in cluster.routers():
                if router.pid not in [process.pid for process in stopped]:
                    router.send_signal(blow)
                    stopped.append(router)
                    break
            for process in stopped[:-1]:
                process.send_signal(signal.SIGCONT) if process.is_running() else None
            wait_until(lambda: runs_in(tmp_path, batch) > before or is_final(client, batch))  # noqa: B023
        for process in stopped:
            if process.is_running():
                process.send_signal(signal.SIGCONT)
        assert_complete(client, batch)


def test_a_batch_goes_on_after_the_whole_cluster_was_killed(tmp_path: Path) -> None:
    with launched(*options(tmp_path)) as cluster, openai_client(cluster) as client:
        cluster.wait_for(READY, deadline_s=START_S)
        batch = create(client)
        wait_until(lambda: completed(client, batch) >= LINES // 3)
        kill_at_once(cluster.processes())
    with running(tmp_path) as (_, client):
        assert_complete(client, batch)
        assert runs_in(tmp_path, batch) == 2


def test_a_batch_goes_on_while_redis_and_replicas_die(tmp_path: Path) -> None:
    with running(tmp_path) as (cluster, client):
        batch = create(client)
        wait_until(lambda: completed(client, batch) >= LINES // 5)
        redis_of(cluster).flushall()
        wait_until(lambda: completed(client, batch) >= 2 * LINES // 5)
        cluster.titled("kvroute:Replica")[0].kill()
        assert_complete(client, batch)
