"""Background responses end with their whole answer, whatever is killed while they run."""

from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest
from openai import OpenAI

from kvroute.process.builtin_model import BUILTIN_MODEL
from tests.support.clients import openai_client
from tests.support.engines import terse_model
from tests.support.serving import Cluster, start_cluster
from tests.support.waiting import wait_until
from tests.support.whole_fleet import wait_for_fleet

RESPONSES = 6
TOKENS = 600


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    model = str(terse_model(tmp_path_factory.mktemp("vllm") / "model"))
    with start_cluster(
        *("--model", model, "--served-model-name", BUILTIN_MODEL, "--routers", "2"),
        *("--dtype", "float32", "--kv-cache-memory-mb", "256", "--max-model-len", "4096"),
        *("--response-store-mb", "64"),
    ) as cluster:
        yield cluster


def asked(number: int) -> dict[str, Any]:
    return {
        "model": BUILTIN_MODEL,
        "input": f"Tell me story number {number}.",
        "temperature": 0,
        "max_output_tokens": TOKENS,
        "extra_body": {"ignore_eos": True},
    }


def created_events(client: OpenAI, id_: str) -> int:
    """Return how often the response has begun."""
    events = client.responses.retrieve(id_, stream=True)
    return sum(event.type == "response.created" for event in events)


def all_routers(cluster: Cluster) -> list[psutil.Process]:
    return cluster.routers()


def one_replica(cluster: Cluster) -> list[psutil.Process]:
    return cluster.titled("kvroute:Replica")[:1]


@pytest.mark.parametrize(("victims", "begins_again"), [(one_replica, False), (all_routers, True)])
def test_a_killed_process_costs_no_response(
    cluster: Cluster, victims: Callable[[Cluster], list[psutil.Process]], begins_again: bool
) -> None:
    """The responses of a router run again from their beginning; those of a replica go on."""
    wait_for_fleet(cluster)
    with openai_client(cluster, max_retries=8) as client:
        expected = [
            client.responses.create(**asked(number)).output_text for number in range(RESPONSES)
        ]
        ids = [
            client.responses.create(**asked(number), background=True).id
            for number in range(RESPONSES)
        ]
        wait_until(
            lambda: all(client.responses.retrieve(id_).status == "in_progress" for id_ in ids)
        )
        killed = victims(cluster)
        assert killed
        for process in killed:
            process.kill()
        wait_until(
            lambda: all(
                client.responses.retrieve(id_).status not in ("queued", "in_progress")
                for id_ in ids
            ),
            within_s=300,
        )
        ended = [client.responses.retrieve(id_) for id_ in ids]
        assert [each.status for each in ended] == ["incomplete"] * RESPONSES
        assert [each.output_text for each in ended] == expected
        begins = [created_events(client, id_) for id_ in ids]
        assert (max(begins) > 1) == begins_again
