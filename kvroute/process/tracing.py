"""Tracing: sends the spans of a process's requests to an OpenTelemetry collector.

OpenTelemetry's own environment variables set the collector and the sampling. A thread sends the
spans from a bounded queue, so no request waits for the collector. If the collector is slow or
unreachable, spans are lost. This is logged once.
"""

import logging
import os
import threading
import time

from msgspec.structs import replace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from kvroute.contract.generation import Chunk, Emit, Generate, GenerateRequest, TraceContext

log = logging.getLogger("kvroute.tracing")

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
TRACES_ENDPOINT = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
PROTOCOL = "OTEL_EXPORTER_OTLP_PROTOCOL"
TRACES_PROTOCOL = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"
SERVICE = "OTEL_SERVICE_NAME"
FLUSH_S = 2.0  # maximum seconds that a process waits at its end to send its last spans

_w3c = TraceContextTextMapPropagator()


def traces_endpoint() -> str | None:
    """Return the collector's address; None: no tracing. Raises ValueError for a bad protocol."""
    if endpoint := os.environ.get(TRACES_ENDPOINT):
        return endpoint
    if base := os.environ.get(ENDPOINT):
        return base if protocol() == "grpc" else f"{base.rstrip('/')}/v1/traces"
    return None


def protocol() -> str:
    """Return the protocol of OTLP, by default HTTP. Raises ValueError for an unknown protocol."""
    name = TRACES_PROTOCOL if os.environ.get(TRACES_PROTOCOL) else PROTOCOL
    value = os.environ.get(name) or "http/protobuf"
    if value not in ("grpc", "http/protobuf"):
        raise ValueError(f"{name} is {value!r}; expected grpc or http/protobuf")
    return value


def start_tracing(service: str, instance: str) -> "Tracing | None":
    """Start tracing in this process, or return None if no collector is configured."""
    return Tracing(service, instance) if traces_endpoint() else None


def context_of(headers: TraceContext) -> Context:
    """Return the context of the span in the headers. The span may be of another process."""
    return _w3c.extract(headers)


def headers_of(span: Span) -> TraceContext:
    """Return headers with which another process can add child spans to the span."""
    headers: dict[str, str] = {}
    _w3c.inject(headers, set_span_in_context(span))
    return headers


class Tracing:
    """Tracing in one process, until it is closed."""

    def __init__(self, service: str, instance: str) -> None:
        # vLLM creates its own tracer provider in this process and configures it by these variables.
        os.environ.setdefault(SERVICE, service)
        os.environ[TRACES_PROTOCOL] = protocol()
        self._exporter = _exporter()
        self._provider = TracerProvider(
            resource=Resource.create({"service.instance.id": instance}), shutdown_on_exit=False
        )
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter))
        self.tracer: Tracer = self._provider.get_tracer("kvroute")
        exporter_log = logging.getLogger("opentelemetry")
        exporter_log.handlers, exporter_log.propagate = [_FirstOnly()], False

    def close(self) -> None:
        """Send the last spans, which may take FLUSH_S, and stop tracing."""
        flush = threading.Thread(target=self._provider.force_flush, daemon=True)
        flush.start()
        flush.join(FLUSH_S)
        self._exporter.shutdown()

    def traced(self, generate: Generate) -> Generate:
        """Wrap `generate`: each request gets a span, which is the parent of the engine's spans."""

        async def generate_traced(request: GenerateRequest, emit: Emit) -> None:
            span = self._begin(request)
            start_s, output_tokens = time.monotonic(), 0

            def count(chunk: Chunk) -> None:
                nonlocal output_tokens
                if not output_tokens:
                    _record_first(span, chunk, time.monotonic() - start_s)
                output_tokens += len(chunk.token_ids)
                emit(chunk)

            try:
                await generate(replace(request, trace=headers_of(span)), count)
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
            },
        )


class _FirstOnly(logging.Handler):
    """A handler that logs only the first failure. OpenTelemetry reports each failed batch."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._has_logged = False

    def emit(self, record: logging.LogRecord) -> None:
        if not self._has_logged:
            self._has_logged = True
            log.warning(
                "spans could not be sent and are lost; further losses are not logged: %s",
                record.getMessage(),
            )


def _record_first(span: Span, chunk: Chunk, waited_s: float) -> None:
    span.set_attribute("gen_ai.response.time_to_first_chunk", waited_s)
    span.set_attribute("gen_ai.usage.cache_read.input_tokens", chunk.cached_tokens)


def _exporter() -> SpanExporter:
    if protocol() == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc import trace_exporter as grpc

        return grpc.OTLPSpanExporter()
    from opentelemetry.exporter.otlp.proto.http import trace_exporter as http

    return http.OTLPSpanExporter()
