"""Long answers hold the caches of real engines, and short chats do not wait for them in a queue.

The caches are so small that each engine can run two of the long answers at a time.
"""

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed

import httpx
import pytest

from kvroute.process.builtin_model import BUILTIN_MODEL
from tests.support.engines import terse_model
from tests.support.serving import COMMAND, Cluster, start_cluster

LONG, LONG_TOKENS = 9, 1500  # long answers at the same time, and the tokens of each
MAX_WAIT_S = 10.0  # much shorter than the long answers take together
PAUSE_S = 1.0  # seconds between two short chats


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    model = str(terse_model(tmp_path_factory.mktemp("vllm") / "model"))
    with start_cluster(
        *("--model", model, "--served-model-name", BUILTIN_MODEL, "--max-model-len", "2048"),
        *("--engine-arg", "num_gpu_blocks_override=90", "--max-wait-s", str(MAX_WAIT_S)),
        command=("nice", "-n", "10", *COMMAND),
    ) as cluster:
        yield cluster


def test_no_request_waits_in_an_engine_beyond_its_limit_or_beside_a_free_one(
    cluster: Cluster,
) -> None:
    with ThreadPoolExecutor(200) as pool:
        long = [pool.submit(answer, cluster, LONG_TOKENS, number) for number in range(LONG)]
        short: list[Future[int]] = []
        while not all(future.done() for future in long):
            short.append(pool.submit(answer, cluster, 4, len(short)))
            time.sleep(PAUSE_S)
        statuses = [future.result() for future in as_completed([*long, *short])]
    assert statuses.count(200) >= len(short) // 2


def answer(cluster: Cluster, tokens: int, number: int) -> int:
    """Return the status of a completion with so many tokens. Each has a prompt of its own.

    It is 200, or 429 if the request has waited too long. The cluster runs with a low priority, so
    on a busy machine HAProxy can read a request too late and answer 408. Then the request is
    repeated, at most twice, as the official clients do.
    """
    body = {
        "model": BUILTIN_MODEL,
        "prompt": f"number {number} of {tokens}: " * 4,
        "max_tokens": tokens,
        "ignore_eos": True,
    }
    for _ in range(3):
        response = httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=600)
        if response.status_code != 408:
            break
    if response.status_code != 200:
        assert response.status_code == 429, response.text
        assert response.json()["error"]["code"] == "wait_too_long"
        assert int(response.headers["retry-after"]) >= 1
    return response.status_code
