"""Logs and traces of a real cluster: one id and one trace, from the header to the engine."""

import asyncio
import os
import signal
import uuid
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvroute.process.builtin_model import BUILTIN_MODEL
from tests.support.collector import Collector, Span
from tests.support.json_lines import read_lines
from tests.support.serving import Cluster
from tests.support.waiting import until
from tests.support.whole_fleet import wait_for_fleet

REQUEST = "POST /v1/chat/completions"
WHOLE = [REQUEST, "tokenise", "place", "dispatch", "generate"]


def chat(cluster: Cluster, headers: dict[str, Any], **more: Any) -> httpx.Response:
    messages = [{"role": "user", "content": "Hello there"}]
    body = {"messages": messages, "max_tokens": 4} | more
    url = cluster.url + "/v1/chat/completions"
    return httpx.post(url, json=body, headers=headers, timeout=60)


def log_lines(cluster: Cluster) -> list[dict[str, Any]]:
    """What routers and replicas have logged; every line is JSON."""
    (folder,) = [line.split()[1] for line in cluster.output().splitlines() if "logs: " in line]
    files = Path(folder).glob("replica_*.log")
    return read_lines(files)


@pytest.mark.parametrize(
    ("more", "status"), [({}, 200), ({"stream": True}, 200), ({"model": "none"}, 404)]
)
def test_every_answer_has_the_id_of_its_request(
    cluster: Cluster, more: dict[str, Any], status: int
) -> None:
    answer = chat(cluster, {"x-request-id": "mine"}, **more)
    assert (answer.status_code, answer.headers.get_list("x-request-id")) == (status, ["mine"])


def test_a_route_that_does_not_exist_names_the_request_too(cluster: Cluster) -> None:
    headers = {"x-request-id": "lost"}
    answer = httpx.get(cluster.url + "/nowhere", headers=headers, timeout=60)
    assert answer.headers["x-request-id"] == "lost"


@pytest.mark.parametrize("bad", [b"two words", "é".encode("latin-1"), b"x" * 129])
def test_an_id_that_is_no_good_is_replaced(cluster: Cluster, bad: bytes) -> None:
    answer = chat(cluster, {"x-request-id": bad})
    assert answer.status_code == 200
    assert answer.headers["x-request-id"].encode() != bad


async def test_the_id_is_in_the_object_the_receipt_and_the_request_log(
    cluster: Cluster, request_log: Path
) -> None:
    answer = chat(cluster, {"x-request-id": "everywhere", "x-kvroute-receipt": "1"}).json()
    assert answer["id"] == "chatcmpl-everywhere"
    assert answer["kvroute_receipts"][0]["request_id"].startswith("everywhere-")
    await until(
        lambda: any('"everywhere"' in file.read_text() for file in request_log.glob("*.jsonl"))
    )


async def test_logs_of_router_and_replica_name_the_request(cluster: Cluster) -> None:
    chat(cluster, {"x-request-id": "logged"})

    def deployments() -> set[str]:
        return {
            line["deployment"] for line in log_lines(cluster) if line.get("request_id") == "logged"
        }

    await until(lambda: deployments() == {"kvroute_Router", "kvroute_Replica"})


def test_our_own_lines_say_who_speaks_and_of_which_model(cluster: Cluster) -> None:
    said = [line for line in log_lines(cluster) if line["name"] == "kvroute.replica"]
    listed = httpx.get(cluster.url + "/v1/cluster", timeout=10).json()["replicas"]
    assert {line["replica"] for line in said} >= {replica["id"] for replica in listed}
    assert {(line["levelname"], line["model"]) for line in said} == {("INFO", BUILTIN_MODEL)}


async def traced(collector: Collector, trace_id: str, names: list[str]) -> list[Span]:
    """The trace, once it has spans of those names, the earliest first."""
    await until(lambda: len(collector.trace(trace_id)) >= len(names))
    trace = collector.trace(trace_id)
    assert sorted(span.name for span in trace) == sorted(names)
    return trace


def span(trace: list[Span], name: str) -> Span:
    (found,) = (each for each in trace if each.name == name)
    return found


@pytest.mark.parametrize("stream", [False, True])
async def test_router_and_replica_share_the_clients_trace(
    cluster: Cluster, collector: Collector, stream: bool
) -> None:
    trace_id, parent_id = uuid.uuid4().hex, uuid.uuid4().hex[:16]
    headers = {"x-request-id": "traced", "traceparent": f"00-{trace_id}-{parent_id}-01"}
    answer = chat(cluster, headers, stream=stream)
    trace = await traced(collector, trace_id, WHOLE)
    request, dispatch, generate = (span(trace, name) for name in (REQUEST, "dispatch", "generate"))
    parents = [request.parent_id, dispatch.parent_id, generate.parent_id]
    assert parents == [parent_id, request.span_id, dispatch.span_id]
    assert {each.parent_id for each in trace[1:3]} == {request.span_id}  # tokenise and place
    assert request.start_ns <= dispatch.start_ns <= dispatch.end_ns <= request.end_ns
    assert (request.service, generate.service) == ("kvroute-router", "kvroute-replica")
    assert request.attributes["http.response.status_code"] == 200
    assert dispatch.attributes["kvroute.replica"] == answer.headers["x-kvroute-replica"]
    assert dispatch.attributes["kvroute.outcome"] == "ok"
    for usage in (dispatch.attributes, generate.attributes):
        assert usage["gen_ai.usage.output_tokens"] == 4
        assert usage["gen_ai.response.time_to_first_chunk"] > 0


async def test_a_request_without_a_trace_begins_one(cluster: Cluster, collector: Collector) -> None:
    chat(cluster, {"x-request-id": "first"})
    await until(lambda: collector.trace_ids("first"))
    (trace_id,) = collector.trace_ids("first")
    trace = await traced(collector, trace_id, WHOLE)
    assert trace[0].parent_id == ""


async def test_an_error_is_a_span_by_itself(cluster: Cluster, collector: Collector) -> None:
    chat(cluster, {"x-request-id": "wrong"}, model="none")
    await until(lambda: collector.trace_ids("wrong"))
    (request,) = collector.trace(*collector.trace_ids("wrong"))
    assert request.attributes["http.response.status_code"] == 404


async def test_a_replica_that_dies_leaves_a_failed_dispatch_beside_the_next_one(
    cluster: Cluster, collector: Collector
) -> None:
    wait_for_fleet(cluster)
    trace_id = uuid.uuid4().hex
    headers = {"traceparent": f"00-{trace_id}-{'1' * 16}-01"}
    body = {"prompt": "Once upon a time", "max_tokens": 8000, "stream": True}
    async with httpx.AsyncClient(base_url=cluster.url, timeout=60) as client:
        before = await replicas(client)
    async with (
        httpx.AsyncClient(base_url=cluster.url, timeout=60) as client,
        client.stream("POST", "/v1/completions", json=body, headers=headers) as answer,
    ):
        lines = answer.aiter_lines()
        await anext(lines)
        victim = answer.headers["x-kvroute-replica"]
        os.kill(before[victim], signal.SIGKILL)
        assert "data: [DONE]" in [line async for line in lines]
    names = ["POST /v1/completions", "tokenise", *["place", "dispatch"] * 2, "generate"]
    trace = await traced(collector, trace_id, names)  # the dead replica's own is lost with it
    lost, taken_over = (each for each in trace if each.name == "dispatch")
    assert (lost.is_failed, lost.attributes["kvroute.replica"]) == (True, victim)
    assert (taken_over.is_failed, taken_over.attributes["kvroute.outcome"]) == (False, "ok")
    assert span(trace, "generate").parent_id == taken_over.span_id
    wait_for_fleet(cluster)


async def replicas(client: httpx.AsyncClient) -> dict[str, int]:
    """Process ids, by id."""
    listed = (await client.get("/v1/cluster")).json()["replicas"]
    return {replica["id"]: replica["pid"] for replica in listed}


async def test_without_its_collector_the_cluster_serves_on_and_says_so_once(
    cluster: Cluster, collector: Collector
) -> None:
    """The last test: the cluster has to stop as quickly as ever, too."""
    collector.close()
    complaints = {"kvroute_Router": 2, "kvroute_Replica": 4}  # one each

    def said() -> Counter[str]:
        lost = (line for line in log_lines(cluster) if line["name"] == "kvroute.tracing")
        return Counter(line["deployment"] for line in lost)

    while said() != complaints:
        assert chat(cluster, {}).status_code == 200
        await asyncio.sleep(0.1)
    assert said() == complaints
