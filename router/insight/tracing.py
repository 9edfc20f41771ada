"""A request's way through this router, as spans: how long each step took, and where it went.

Where nobody asks for them, each step costs one look at a variable.
"""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from replica.tracing import Tracing, context_of, headers_of, start_tracing
from router.api.request_id import HEADER
from router.routing.trips import Placement, Trip, Witness

_tracing: Tracing | None = None  # of this process


def start(router_id: str) -> None:
    """Spans are kept from now on, where the environment names a collector."""
    global _tracing
    _tracing = start_tracing("kvroute-router", router_id)


def dispatches() -> Witness | None:
    """Whoever sees dispatches for the spans, where any are kept."""
    return Dispatches(_tracing) if _tracing else None


def close() -> None:
    """The last spans are sent, or given up."""
    if _tracing:
        _tracing.close()


def step(name: str) -> AbstractContextManager[object]:
    """A span of what is done within."""
    return _tracing.tracer.start_as_current_span(name) if _tracing else nullcontext()


class Requests:
    """A span of each HTTP request, from its headers to the last byte of its answer; it belongs to
    the client's, if that names one. What is only looked at, by machines again and again, has none.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if _tracing is None or scope["type"] != "http" or scope["method"] == "GET":
            await self._app(scope, receive, send)
            return
        with _request_span(_tracing, scope) as span:

            async def send_noted(message: Message) -> None:
                if message["type"] == "http.response.start":
                    _note_status(span, message["status"])
                await send(message)

            await self._app(scope, receive, send_noted)


@contextmanager
def _request_span(tracing: Tracing, scope: Scope) -> Iterator[Span]:
    headers, method = Headers(scope=scope), scope["method"]
    with tracing.tracer.start_as_current_span(
        method,
        context=context_of(dict(headers)),
        kind=SpanKind.SERVER,
        attributes={
            "http.request.method": method,
            "url.path": scope["path"],
            "kvroute.request_id": headers.get(HEADER, ""),
        },
    ) as span:
        try:
            yield span
        except Exception:
            _note_status(span, 500)  # the answer is made outside of here
            raise
        finally:
            if route := scope.get("route"):
                span.update_name(f"{method} {route.path}")
                span.set_attribute("http.route", route.path)


def _note_status(span: Span, status: int) -> None:
    span.set_attribute("http.response.status_code", status)
    if status >= 500:
        span.set_status(StatusCode.ERROR)


class Dispatches(Witness):
    """A span of each decision, and one of each replica that a prompt was sent to. The latter spans
    the whole answer; a replica that was full and the one it went to instead share it."""

    def __init__(self, tracing: Tracing) -> None:
        self._tracer = tracing.tracer
        self._spans: dict[str, Span] = {}  # under way; by request id, of which one trip runs

    def placed(self, placement: Placement, decision_s: float) -> None:
        span = self._tracer.start_span("place", start_time=time.time_ns() - int(decision_s * 1e9))
        span.set_attribute("kvroute.best_hit_tokens", placement.reusable_tokens)
        span.set_attribute("kvroute.replicas", len(placement.ranking))
        span.end()

    def sent(self, trip: Trip) -> None:
        span = self._spans.get(trip.request_id) or self._begin(trip)
        span.set_attribute("kvroute.replica", trip.replica_id)
        if placement := trip.placement:
            expected_tokens = placement.expected_tokens(trip.replica_id)
            predicted_ttft_s = placement.predicted_ttft_s(trip.replica_id)
            span.set_attribute("kvroute.expected_tokens", expected_tokens)
            span.set_attribute("kvroute.predicted_ttft_s", predicted_ttft_s)

    def first_token(self, trip: Trip) -> None:
        span = self._spans[trip.request_id]
        if trip.first_token_s is not None:
            waited_s = trip.first_token_s - trip.sent_s
            span.set_attribute("gen_ai.response.time_to_first_chunk", waited_s)
        if trip.cached_tokens is not None:
            span.set_attribute("gen_ai.usage.cache_read.input_tokens", trip.cached_tokens)

    def ended(self, trip: Trip) -> None:
        if trip.outcome == "moved":
            self._spans[trip.request_id].add_event("moved", {"kvroute.replica": trip.replica_id})
            return
        span = self._spans.pop(trip.request_id)
        span.set_attribute("kvroute.outcome", trip.outcome or "")
        span.set_attribute("gen_ai.usage.output_tokens", trip.output_tokens)
        if trip.outcome in ("failed", "refused"):
            span.set_status(Status(StatusCode.ERROR, trip.outcome))
        span.end()

    def _begin(self, trip: Trip) -> Span:
        span = self._tracer.start_span("dispatch", kind=SpanKind.CLIENT)
        span.set_attribute("kvroute.request_id", trip.request_id)
        span.set_attribute("gen_ai.usage.input_tokens", trip.dispatch.prompt_tokens)
        self._spans[trip.request_id] = span
        trip.trace = headers_of(span)
        return span
