"""Spans are sent to the collector in OpenTelemetry's variables, and record each dispatch."""

import random
from collections.abc import Iterator

import numpy as np
import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from kvroute.blocks.tiers import HOST
from kvroute.contract.generation import Chunk, GenerateRequest
from kvroute.contract.records import ReplicaRecord, TierFacts
from kvroute.process import tracing
from kvroute.process.tracing import Tracing, protocol, start_tracing, traces_endpoint
from kvroute.replica.sim_engine.config import SimulatedConfig
from kvroute.replica.sim_engine.simulated import SimulatedEngine
from kvroute.router.observability.request_spans import Dispatches
from kvroute.router.placement.attempts import Attempt
from kvroute.router.placement.fleet import Fleet
from tests.support.chunks import streamed
from tests.support.records import FACTS, LOAD, record

HERE = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://here:4318/"}
THERE = {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://there:1/mine"}
GRPC = {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}
PROMPT = np.arange(100, dtype=np.uint32)


@pytest.fixture(autouse=True)
def _no_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (tracing.ENDPOINT, tracing.TRACES_ENDPOINT):
        monkeypatch.delenv(name, raising=False)
    for name in (tracing.PROTOCOL, tracing.TRACES_PROTOCOL, tracing.SERVICE):
        monkeypatch.setenv(name, "")  # so that what is set meanwhile goes with the test


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    exporter = InMemorySpanExporter()
    monkeypatch.setattr(tracing, "_exporter", lambda: exporter)
    return exporter


@pytest.fixture
def traces(kept: InMemorySpanExporter) -> Iterator[Tracing]:
    traces = Tracing("kvroute-test", "1")
    yield traces
    traces._provider.shutdown()


def spans(traces: Tracing, kept: InMemorySpanExporter) -> tuple[ReadableSpan, ...]:
    traces._provider.force_flush()
    return kept.get_finished_spans()


@pytest.mark.parametrize(
    ("env", "endpoint"),
    [
        ({}, None),
        (HERE, "http://here:4318/v1/traces"),
        (HERE | GRPC, "http://here:4318/"),
        (HERE | THERE, "http://there:1/mine"),
    ],
)
def test_spans_are_sent_to_the_collector_in_the_environment(
    monkeypatch: pytest.MonkeyPatch, env: dict[str, str], endpoint: str | None
) -> None:
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert traces_endpoint() == endpoint


def test_tracing_is_off_without_a_collector() -> None:
    assert start_tracing("kvroute-test", "1") is None


def test_an_unsupported_protocol_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(tracing.PROTOCOL, "http/json")
    with pytest.raises(ValueError, match="OTEL_EXPORTER_OTLP_PROTOCOL is 'http/json'; expected"):
        protocol()


async def test_an_answer_whose_client_left_ends_its_span(
    traces: Tracing, kept: InMemorySpanExporter
) -> None:
    engine = SimulatedEngine(SimulatedConfig(prefill_tokens_per_s=0, decode_step_s=0))
    request = GenerateRequest("r", PROMPT, max_tokens=50)
    chunks = streamed(traces.traced(engine.generate), request)
    await anext(chunks)
    await chunks.aclose()
    (span,) = spans(traces, kept)
    assert (span.name, span.status.is_ok) == ("generate", True)
    assert span.attributes
    assert span.attributes["gen_ai.usage.output_tokens"] == 1
    await engine.close()


def sent(fleet: Fleet, replica_id: str) -> Attempt:
    placement = fleet.place(PROMPT, ["full", "free"], 0.0)
    return fleet.sent(placement, replica_id, "r", 0.0)


def test_a_span_has_the_tokens_from_host_memory(
    traces: Tracing, kept: InMemorySpanExporter
) -> None:
    observer = Dispatches(traces)
    fleet = Fleet(model="m", revision="", block_size=4, rng=random.Random(0), observer=observer)
    fleet.update([record("full", host=TierFacts(1000, 1000, 1e6)), record("free")])
    fleet.mirror.join("full")
    fleet.mirror.add("full", map(HOST.fingerprint, fleet.caches.chain(PROMPT)))
    attempt = sent(fleet, "full")
    attempt.receive(Chunk((1,), 8, is_last=True), 1.0)
    attempt.end()
    (span,) = spans(traces, kept)
    assert span.attributes
    assert span.attributes["kvroute.host_tokens"] == 8


def test_the_dispatches_to_a_full_replica_and_to_the_next_one_share_a_span(
    traces: Tracing, kept: InMemorySpanExporter
) -> None:
    observer = Dispatches(traces)
    fleet = Fleet(model="m", revision="", block_size=32, rng=random.Random(0), observer=observer)
    fleet.update([ReplicaRecord(id_, "1", 0, FACTS, LOAD) for id_ in ("full", "free")])
    sent(fleet, "full").end("moved")
    sent(fleet, "free").end("cancelled")
    (span,) = spans(traces, kept)
    assert span.attributes
    assert span.attributes["kvroute.replica"] == "free"
    assert span.attributes["kvroute.outcome"] == "cancelled"
    assert [dict(event.attributes or {}) for event in span.events] == [{"kvroute.replica": "full"}]
