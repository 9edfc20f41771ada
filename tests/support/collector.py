"""An OpenTelemetry collector for tests, which stores the spans that it receives over HTTP."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Status


@dataclass(frozen=True)
class Span:
    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str  # empty for the first span of a trace
    is_failed: bool
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]


class Collector:
    """A collector that listens from its creation on."""

    def __init__(self) -> None:
        self._spans: list[Span] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:  # http.server's name
                body = self.rfile.read(int(self.headers["content-length"]))
                collector._spans.extend(spans_of(ExportTraceServiceRequest.FromString(body)))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *args: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.env = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{self._server.server_port}",
            "OTEL_BSP_SCHEDULE_DELAY": "100",  # milliseconds
        }
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def trace(self, trace_id: str) -> list[Span]:
        """Return the received spans of a trace, sorted by their start."""
        spans = (span for span in self._spans if span.trace_id == trace_id)
        return sorted(spans, key=lambda span: span.start_ns)

    def trace_ids(self, request_id: str) -> set[str]:
        """Return the ids of the traces that contain a span of this request."""
        return {
            span.trace_id
            for span in self._spans
            if span.attributes.get("kvroute.request_id") == request_id
        }

    def close(self) -> None:
        """Stop listening. A second call does nothing."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()


@contextmanager
def collecting() -> Iterator[Collector]:
    collector = Collector()
    try:
        yield collector
    finally:
        collector.close()


def spans_of(sent: ExportTraceServiceRequest) -> Iterator[Span]:
    for resource in sent.resource_spans:
        service = values(resource.resource.attributes)["service.name"]
        for scope in resource.scope_spans:
            for span in scope.spans:
                yield Span(
                    service,
                    span.name,
                    span.trace_id.hex(),
                    span.span_id.hex(),
                    span.parent_span_id.hex(),
                    span.status.code == Status.STATUS_CODE_ERROR,
                    span.start_time_unix_nano,
                    span.end_time_unix_nano,
                    values(span.attributes),
                )


def values(attributes: Any) -> dict[str, Any]:
    def value(pair: KeyValue) -> Any:
        return getattr(pair.value, pair.value.WhichOneof("value") or "string_value")

    return {pair.key: value(pair) for pair in attributes}
