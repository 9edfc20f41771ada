"""What requests do in a process, as spans for the collector that the environment names.

OpenTelemetry's own variables say where spans go and how many of them are kept. Spans wait in a
bounded queue for a thread that sends them: no request waits for a collector, and what a slow or
absent one does not take is lost, which the log says once.
"""

import logging
import os
import threading
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import replace

from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from replica.protocol import Chunk, GenerateRequest, TraceContext

log = logging.getLogger("kvroute.tracing")

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
TRACES_ENDPOINT = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
PROTOCOL = "OTEL_EXPORTER_OTLP_PROTOCOL"
TRACES_PROTOCOL = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"
SERVICE = "OTEL_SERVICE_NAME"
FLUSH_S = 2.0  # the longest that a process's end waits for its last spans to be sent

Generate = Callable[[GenerateRequest], AsyncGenerator[Chunk, None]]

_w3c = TraceContextTextMapPropagator()


def traces_endpoint() -> str | None:
    """Where spans go; None: nowhere. ValueError for a protocol that is not spoken here."""
    if endpoint := os.environ.get(TRACES_ENDPOINT):
        return endpoint
    if base := os.environ.get(ENDPOINT):
        return base if protocol() == "grpc" else f"{base.rstrip('/')}/v1/traces"
    return None


def protocol() -> str:
    """OTLP over gRPC or over HTTP, which is OpenTelemetry's own default."""
    name = TRACES_PROTOCOL if os.environ.get(TRACES_PROTOCOL) else PROTOCOL
    spoken = os.environ.get(name) or "http/protobuf"
    if spoken not in ("grpc", "http/protobuf"):
        raise ValueError(f"{name} is {spoken!r}; expected grpc or http/protobuf")
    return spoken


def start_tracing(service: str, instance: str) -> "Tracing | None":
    """For this process, of which a service has several instances; None where nobody asks for it."""
    return Tracing(service, instance) if traces_endpoint() else None


def context_of(headers: TraceContext) -> Context:
    """Of the span that they name, in whatever process it is."""
    return _w3c.extract(headers)


def headers_of(span: Span) -> TraceContext:
    headers: dict[str, str] = {}
    _w3c.inject(headers, set_span_in_context(span))
    return headers


class Tracing:
    """One process's spans, until it is closed."""

    def __init__(self, service: str, instance: str) -> None:
        # vLLM, in this process, has a provider of its own, and knows no other variables.
        os.environ.setdefault(SERVICE, service)
        os.environ[TRACES_PROTOCOL] = protocol()
        self._exporter = _exporter()
        self._provider = TracerProvider(
            resource=Resource.create({"service.instance.id": instance}), shutdown_on_exit=False
        )
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter))
        self.tracer: Tracer = self._provider.get_tracer("kvroute")
        complaints = logging.getLogger("opentelemetry")
        complaints.handlers, complaints.propagate = [_FirstOnly()], False

    def close(self) -> None:
        """The last spans are sent, or given up."""
        flush = threading.Thread(target=self._provider.force_flush, daemon=True)
        flush.start()
        flush.join(FLUSH_S)
        self._exporter.shutdown()

    def traced(self, generate: Generate) -> Generate:
        """The same chunks, and a span of each request, to which the engine's own belong."""

        async def generate_traced(request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
            span = self._begin(request)
            began_s, output_tokens = time.monotonic(), 0
            try:
                chunks = generate(replace(request, trace=headers_of(span)))
                async with aclosing(chunks):
                    async for chunk in chunks:
                        if not output_tokens:
                            _note_first(span, chunk, time.monotonic() - began_s)
                        output_tokens += len(chunk.token_ids)
                        yield chunk
            except Exception as error:
                span.set_status(Status(StatusCode.ERROR, str(error)))
                raise
            finally:
                span.set_attribute("gen_ai.usage.output_tokens", output_tokens)
                span.end()

        return generate_traced

    def _begin(self, request: GenerateRequest) -> Span:
        return self.tracer.start_span(
            "generate",
            context=context_of(request.trace or {}),
            kind=SpanKind.SERVER,
            attributes={
                "kvroute.request_id": request.request_id,
                "kvroute.answered_tokens": request.answered,
                "gen_ai.usage.input_tokens": len(request.prompt_ids),
                "gen_ai.request.max_tokens": request.sampling.max_tokens,
            },
        )


class _FirstOnly(logging.Handler):
    """The exporters complain about every batch."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._has_spoken = False

    def emit(self, record: logging.LogRecord) -> None:
        if not self._has_spoken:
            self._has_spoken = True
            log.warning("spans are lost, which is said this once: %s", record.getMessage())


def _note_first(span: Span, chunk: Chunk, waited_s: float) -> None:
    span.set_attribute("gen_ai.response.time_to_first_chunk", waited_s)
    span.set_attribute("gen_ai.usage.cache_read.input_tokens", chunk.cached_tokens)


def _exporter() -> SpanExporter:
    if protocol() == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc import trace_exporter as grpc

        return grpc.OTLPSpanExporter()
    from opentelemetry.exporter.otlp.proto.http import trace_exporter as http

    return http.OTLPSpanExporter()
