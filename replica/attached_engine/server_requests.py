"""Sends requests to one rank of an attached server, and answers that another server has begun."""

import logging
from collections.abc import AsyncIterator, Mapping
from http import HTTPStatus
from typing import Any

from msgspec.structs import replace

from kvroute.contract.generation import (
    Chunk,
    Emit,
    EngineAwayError,
    GenerateRequest,
    NotBegunError,
    client_id,
)
from kvroute.contract.http_call import HttpCall, Rendered
from kvroute.contract.preparation import prepared
from kvroute.process.asgi import pieces
from kvroute.replica.attached_engine.answer import UNKNOWN_TOKEN, ServerAnswer
from kvroute.replica.attached_engine.resumption.plain_stream import PlainStream, plain_stream
from kvroute.replica.attached_engine.resumption.resume import refusal, resumed_events
from kvroute.replica.attached_engine.resumption.token_events import TokenEvents
from kvroute.replica.attached_engine.server_bodies import (
    COMPLETIONS,
    ServerUsage,
    body_headers,
    forwarded,
    with_token_ids,
)
from kvroute.replica.attached_engine.server_client import (
    NoConnectionError,
    ServerLostError,
)
from kvroute.replica.attached_engine.server_connection import ServerConnection
from kvroute.replica.attached_engine.server_facts import ServerFacts
from kvroute.replica.attached_engine.server_rendering import render

log = logging.getLogger("kvroute.attached")

RANK_HEADER = "x-data-parallel-rank"  # the rank that is to run the request


class ServerRequests:
    """The requests to one data parallel rank of a server.

    Attributes:
        rendering_differences: Prompts that had another length at the server than at the router.
    """

    def __init__(
        self,
        connection: ServerConnection,
        server: ServerFacts,
        rank: int,
        block_size: int,
        *,
        has_usual_limit: bool,
    ) -> None:
        """Create the object.

        Args:
            connection: The server; its owner closes it.
            server: What the server says about itself.
            rank: The number of the data parallel rank.
            block_size: Tokens of a block.
            has_usual_limit: Whether the model's own settings limit the tokens of an answer whose
                request does not.
        """
        self.rendering_differences = 0
        self._connection = connection
        self._rank_headers = {RANK_HEADER: str(rank)} if len(server.ranks) > 1 else {}
        self._model = server.model
        self._block_size = block_size
        # The most tokens of a prompt and its answer, without another limit; 0: unknown.
        self._context = 0 if has_usual_limit else server.max_model_len

    async def send(
        self, request: GenerateRequest, emit: Emit, *, expected_tokens: int, reports_hits: bool
    ) -> bool:
        """Send a request, emit its answer, and return whether the server has computed the prompt.

        Args:
            request: The request.
            emit: Gets each part of the answer.
            expected_tokens: Tokens of the prompt that the server has cached, as far as known.
            reports_hits: Whether to ask the server for events of the blocks that it reuses.

        Raises:
            NotBegunError: No connection to the server could be made, or it cannot continue an
                answer that another engine has begun.
            EngineAwayError: The server does not answer, or has stopped in the middle.
            ValueError: The server has refused a prompt without an HTTP request.
        """
        call = request.call
        plain = plain_stream(call, self._context) if call else None
        if request.answered and (call is None or plain is None or call.text_chars < 0):
            raise NotBegunError(f"{self._connection.url} cannot continue this answer")
        prepared()
        path, prompt_tokens = call.path if call else "", len(request.prompt_ids)
        is_lost = self._connection.is_lost
        answer = ServerAnswer(path, emit, prompt_tokens, expected_tokens, is_lost=is_lost)
        try:
            if call is None:
                await self._send_raw(request)
                tokens = (UNKNOWN_TOKEN,) * request.max_tokens
                emit(Chunk(tokens, expected_tokens, is_last=True))
                return True
            if request.answered and plain is not None:
                await self._continue(request, call, plain, answer, reports_hits=reports_hits)
            else:
                await self._forward(request, call, plain, answer, reports_hits=reports_hits)
        except ServerLostError as error:
            raise self._away(error, has_emitted=answer.has_emitted) from error
        return answer.status == HTTPStatus.OK

    async def render(self, call: HttpCall) -> Rendered:
        """Return the prompt that the server would make of the call, as far as it tells."""
        try:
            return await render(self._connection.client, call)
        except ServerLostError as error:
            raise self._away(error) from error

    def _away(
        self, error: ServerLostError, *, has_emitted: bool = False
    ) -> EngineAwayError | NotBegunError:
        """Have the server checked now, and return the error for the router.

        Args:
            error: The loss.
            has_emitted: Whether the router has got a part of the answer.
        """
        self._connection.suspect()
        reason = f"{self._connection.url}: {error}"
        if isinstance(error, NoConnectionError) and not has_emitted:
            return NotBegunError(reason)
        return EngineAwayError(reason)

    async def _forward(
        self,
        request: GenerateRequest,
        call: HttpCall,
        plain: PlainStream | None,
        answer: ServerAnswer,
        *,
        reports_hits: bool,
    ) -> None:
        """Send a request that no server has begun to answer."""
        if plain is not None:
            answer.reader = TokenEvents(
                call.path,
                client_id(request.request_id),
                request.token_ids.tolist(),
                shows_ids=plain.returns_ids,
            )
        body = _body(request, call, reports_hits=reports_hits, returns_ids=plain is not None)
        await self._exchange(request, call.path, body, body_headers(call), answer)
        if answer.status == HTTPStatus.OK:
            self._compare(request, call, answer.usage)

    async def _continue(
        self,
        request: GenerateRequest,
        call: HttpCall,
        plain: PlainStream,
        answer: ServerAnswer,
        *,
        reports_hits: bool,
    ) -> None:
        """Continue an answer that another server has begun."""
        events = await resumed_events(
            self._connection.client,
            request.variant or self._model,
            request,
            plain,
            context=self._context,
            block_size=self._block_size,
        )
        if events is None:
            answer.emit(refusal(answer.expected_tokens))
            return
        answer.reader, answer.output_tokens = events, request.answered
        while not events.is_complete:
            rest = replace(call, path=COMPLETIONS, body=events.next_body(), has_prefix=False)
            body = _body(request, rest, reports_hits=reports_hits, returns_ids=True)
            await self._exchange(request, COMPLETIONS, body, body_headers(rest), answer)

    async def _exchange(
        self,
        request: GenerateRequest,
        path: str,
        body: bytes | AsyncIterator[bytes],
        headers: Mapping[str, str],
        answer: ServerAnswer,
    ) -> None:
        """Send a body to a route, and let the answer read the response."""
        headers = {
            **headers,
            "x-request-id": client_id(request.request_id),
            **self._rank_headers,
            **(request.trace or {}),
        }
        async with self._connection.client.open(path, body, headers) as reply:
            if answer.has_emitted and reply.status != HTTPStatus.OK:
                raise ServerLostError(f"the status is {reply.status}")
            answer.status, answer.content_type = reply.status, reply.content_type
            await answer.read(reply.parts())

    def _compare(self, request: GenerateRequest, call: HttpCall, usage: ServerUsage) -> None:
        """Compare the length of the server's prompt with the length of the router's."""
        tokens = len(request.prompt_ids)
        if call.is_rendered and tokens and usage.prompt_tokens not in (None, tokens):
            self.rendering_differences = differences = self.rendering_differences + 1
            if differences.bit_count() == 1:  # the first, second, fourth, eighth, ...
                log.warning(
                    "request %s has %d tokens at %s, and the router's prompt had %d; so far, "
                    "%d requests have differed",
                    client_id(request.request_id),
                    usage.prompt_tokens,
                    self._connection.url,
                    tokens,
                    differences,
                )

    async def _send_raw(self, request: GenerateRequest) -> None:
        """Have a prompt of token ids computed, which no client has sent."""
        body: dict[str, Any] = {
            "model": request.variant or self._model,
            "prompt": request.token_ids.tolist(),
            "max_tokens": request.max_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
        }
        if request.namespace:
            body["cache_salt"] = request.namespace
        headers = {**self._rank_headers, **(request.trace or {})}
        reply = await self._connection.client.post(COMPLETIONS, body, headers)
        if not reply.is_ok:
            reason = reply.content[:300].decode(errors="replace")
            raise ValueError(f"{self._connection.url} has refused a prompt: {reason}")


def _body(
    request: GenerateRequest, call: HttpCall, *, reports_hits: bool, returns_ids: bool
) -> bytes | AsyncIterator[bytes]:
    """Return the body for the server. A form with a recording is sent in parts, unchanged."""
    if call.upload:
        return pieces(call.upload.path)
    body, namespace = call.body, request.namespace or call.namespace
    if call.has_prefix:
        body = with_token_ids(call.path, body, request.token_ids.tolist())
    return forwarded(
        call.path,
        body,
        namespace=namespace,
        reports_hits=reports_hits,
        returns_ids=returns_ids,
    )
