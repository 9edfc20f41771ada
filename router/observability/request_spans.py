"""Tracing spans for the steps of a request in this router.

If tracing is off, a step only checks one variable.
"""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvroute.process.tracing import Tracing, context_of, headers_of, start_tracing
from kvroute.router.middleware.request_id import HEADER
from kvroute.router.placement.attempts import Attempt, Placement, RequestObserver
from kvroute.router.placement.waits import Wait

_tracing: Tracing | None = None  # this process's tracing; None if it is off


def start(router_id: str) -> None:
    """Start to record spans if an environment variable has the address of a collector."""
    global _tracing
    _tracing = start_tracing("kvroute-router", router_id)


def dispatches() -> RequestObserver | None:
    """Return an observer that records a span for each dispatch; None if tracing is off."""
    return Dispatches(_tracing) if _tracing else None


def close() -> None:
    """Send the last spans, or drop them if that fails."""
    if _tracing:
        _tracing.close()


def step(name: str) -> AbstractContextManager[object]:
    """Return a context manager that records a span for its block."""
    return _tracing.tracer.start_as_current_span(name) if _tracing else nullcontext()


class Requests:
    """ASGI middleware that records a span from a request's headers to its response's last byte.

    The span continues the client's `traceparent`. GET requests, which monitoring polls, have no
    span.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if _tracing is None or scope["type"] != "http" or scope["method"] == "GET":
            await self._app(scope, receive, send)
            return
        with _request_span(_tracing, scope) as span:

            async def send_recorded(message: Message) -> None:
                if message["type"] == "http.response.start":
                    _record_status(span, message["status"])
                await send(message)

            await self._app(scope, receive, send_recorded)


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
            _record_status(span, 500)  # an outer layer sends this response
            raise
        finally:
            if route := scope.get("route"):
                span.update_name(f"{method} {route.path}")
                span.set_attribute("http.route", route.path)


def _record_status(span: Span, status: int) -> None:
    span.set_attribute("http.response.status_code", status)
    if status >= 500:
        span.set_status(StatusCode.ERROR)


class Dispatches(RequestObserver):
    """Records a span for each placement decision, each wait in the queue, and each dispatch.

    A dispatch's span ends with the response. If a replica was full, its dispatch and the next one
    share a span.
    """

    def __init__(self, tracing: Tracing) -> None:
        self._tracer = tracing.tracer
        self._spans: dict[str, Span] = {}  # request id -> span of its dispatch, while it runs

    def placed(self, placement: Placement, decision_s: float) -> None:
        span = self._past_span("place", decision_s)
        span.set_attribute("kvroute.best_hit_tokens", placement.reusable_tokens)
        span.set_attribute("kvroute.replicas", len(placement.ranking))
        span.end()

    def waited(self, wait: Wait) -> None:
        span = self._past_span("queue", wait.waited_s)
        span.set_attribute("kvroute.priority", wait.priority)
        span.set_attribute("kvroute.queued_for", wait.reason)
        span.set_attribute("kvroute.forecast_s", wait.forecast_s)
        span.end()

    def sent(self, attempt: Attempt) -> None:
        span = self._spans.get(attempt.request_id) or self._begin(attempt)
        span.set_attribute("kvroute.replica", attempt.replica_id)
        if placement := attempt.placement:
            expected_tokens = placement.expected_tokens(attempt.replica_id)
            predicted_ttft_s = placement.predicted_ttft_s(attempt.replica_id)
            span.set_attribute("kvroute.expected_tokens", expected_tokens)
            span.set_attribute("kvroute.predicted_ttft_s", predicted_ttft_s)

    def first_token(self, attempt: Attempt) -> None:
        span = self._spans[attempt.request_id]
        if attempt.first_token_s is not None:
            waited_s = attempt.first_token_s - attempt.sent_s
            span.set_attribute("gen_ai.response.time_to_first_chunk", waited_s)
        if attempt.cached_tokens is not None:
            span.set_attribute("gen_ai.usage.cache_read.input_tokens", attempt.cached_tokens)
        if attempt.placement and (reloaded := attempt.reloaded_tokens):
            reload_s = attempt.placement.candidate(attempt.replica_id).reload_s
            for tier, tokens in reloaded.items():
                span.set_attribute(f"kvroute.{tier.name}_tokens", tokens)
            span.set_attribute("kvroute.predicted_reload_s", reload_s)

    def ended(self, attempt: Attempt) -> None:
        if attempt.outcome == "moved":
            self._spans[attempt.request_id].add_event(
                "moved", {"kvroute.replica": attempt.replica_id}
            )
            return
        span = self._spans.pop(attempt.request_id)
        span.set_attribute("kvroute.outcome", attempt.outcome or "")
        span.set_attribute("gen_ai.usage.output_tokens", attempt.output_tokens)
        if attempt.outcome in ("failed", "refused"):
            span.set_status(Status(StatusCode.ERROR, attempt.outcome))
        span.end()

    def _past_span(self, name: str, duration_s: float) -> Span:
        """Return a span of a step that has just ended."""
        return self._tracer.start_span(name, start_time=time.time_ns() - int(duration_s * 1e9))

    def _begin(self, attempt: Attempt) -> Span:
        span = self._tracer.start_span("dispatch", kind=SpanKind.CLIENT)
        span.set_attribute("kvroute.request_id", attempt.request_id)
        span.set_attribute("gen_ai.usage.input_tokens", attempt.dispatch.prompt_tokens)
        self._spans[attempt.request_id] = span
        attempt.trace = headers_of(span)
        return span
