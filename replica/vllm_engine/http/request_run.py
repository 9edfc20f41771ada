"""Runs one HTTP request in vLLM's application, and converts its response to chunks.

The application runs over ASGI in its own task, and reads the engine's outputs through
`RequestRun.outputs`. A chunk contains the tokens of one output, and all bytes that the application
sends before it reads the next output. So the tokens and the bytes that a router has received always
belong together, and another replica can continue after them.
"""

import asyncio
import logging
import random
import secrets
import traceback
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from contextvars import ContextVar
from typing import Any

import msgspec
import numpy as np
from fastapi.dependencies.utils import request_body_to_args
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError as VllmDeadError

from kvroute.blocks.fingerprint import MediaSpan
from kvroute.contract.generation import (
    NO_TOKENS,
    Chunk,
    Emit,
    EngineDeadError,
    GenerateRequest,
    client_id,
)
from kvroute.contract.http_call import HttpCall, HttpPart, Rendered
from kvroute.contract.preparation import prepared
from kvroute.process.asgi import body_messages, content_type, post_scope
from kvroute.replica.vllm_engine.blocks.cache_salt import salted
from kvroute.replica.vllm_engine.blocks.retention_hints import hint_args
from kvroute.replica.vllm_engine.core.continued import (
    can_continue,
    prompt_ids,
    remaining_params,
    repeated_outputs,
)
from kvroute.replica.vllm_engine.core.priority import priority_of
from kvroute.replica.vllm_engine.core.step_limits import step_args
from kvroute.replica.vllm_engine.grammar.check import GrammarCheck
from kvroute.replica.vllm_engine.host.pull_orders import pull_args
from kvroute.replica.vllm_engine.http import option_names
from kvroute.replica.vllm_engine.http.sampling_checks import (
    check_prompt_logprobs,
    check_tokens_fit_grammar,
)
from kvroute.replica.vllm_engine.optional_parts import CONTINUATION, GRAMMARS, is_on

log = logging.getLogger("kvroute.replica")

# Number of tokens in a chunk of a response that is not streamed. If the replica is lost, another
# replica has to generate at most this many tokens again.
UNSTREAMED_CHUNK_TOKENS = 32
# Seconds that the application gets to end after the client has left. Then it is cancelled.
END_S = 5.0
RESERVED = "kvroute_"  # prefix of the keys in vLLM's extra_args that clients may not set
RESPONSES = "/v1/responses"
ERROR_EVENT = b"event: error"
# Part of the message of the RuntimeError that Starlette raises in place of an application's error.
STARTED = "response already started"

Message = Mapping[str, Any]  # an ASGI message


class RequestRun:
    """One request in vLLM's application. `lora` is vLLM's argument for its LoRA adapter."""

    def __init__(
        self, request: GenerateRequest, call: HttpCall, emit: Emit, lora: Any = None
    ) -> None:
        self.call = call
        self.random = random.Random(request.request_id)  # yields the same numbers on every replica
        self.request = request
        self.priority = priority_of(request)  # vLLM's priority; a priority in the body is ignored
        self._lora = lora
        self._body = body_messages(call.body, call.upload.path if call.upload else "")
        self._has_left = asyncio.Event()  # set when the client has left
        self._emit = emit
        self._failure: Exception | None = None
        self._token_ids: list[int] = []  # tokens that the engine generated since the last chunk
        self._data: list[bytes] = []  # bytes that the application sent since the last chunk
        self._has_emitted = False  # whether a chunk was emitted
        self._status = 0  # HTTP status for the next chunk; 0: an earlier chunk contains the status
        self._content_type = ""
        self._prompts = 0  # number of prompts that the application passed to the engine
        self._can_continue = True
        # Numbers of prompt tokens that were read from the cache and written to it. None: no output
        # has reported them yet.
        self.counts: tuple[int, int] | None = None
        if call.deltas:  # another replica has begun the response
            self.counts = call.cached_tokens, call.written_tokens

    async def respond(self, app: Any) -> None:
        """Run the application and emit its response. Cancelling this call aborts the request."""
        task = asyncio.create_task(self._run(app))
        try:
            await asyncio.wait([task])
        finally:
            await self._leave(task)
            await self._body.aclose()
        if self._failure is not None:
            raise self._failure

    # ASGI: the application calls `receive` and `send`.

    async def receive(self) -> Message:
        """Return the next part of the request's body; after it, wait until the client has left."""
        if message := await anext(self._body, None):
            return message
        await self._has_left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        """Collect the status and the bytes of the response."""
        if message["type"] == "http.response.start":
            self._status = int(message["status"])
            self._content_type = content_type(message)
        elif body := message.get("body"):
            if body.startswith(ERROR_EVENT):  # from /v1/messages; Anthropic has another error type
                body = body.replace(b'"type":"internal_error"', b'"type":"api_error"')
            self._data.append(body)

    async def _run(self, app: Any) -> None:
        CURRENT.set(self)
        try:
            headers = {"x-request-id": client_id(self.request.request_id)}
            headers |= self.request.trace or {}
            if self.call.upload:
                headers["content-type"] = self.call.upload.content_type
            await app(scope(self.call.path, headers), self.receive, self.send)
            self._emit_chunk(is_last=True)
        except Exception as error:  # the application can raise any exception
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        """Emit an error response if the client has received nothing; else let `respond` fail."""
        if self._failure is not None or self._has_emitted or self.call.deltas:
            self._failure = self._failure or error
            return
        log.warning("vLLM's application failed for %s", self.call.path, exc_info=error)
        is_body = _is_of_validation(error)
        # With a valid body and the status of an error, the application's own response is complete.
        if is_body or self._status < 400:
            message = f"a field of the body has a value of a wrong type: {error}"
            response = create_error_response(message if is_body else _unwrapped(error))
            self._status, self._content_type = response.error.code, "application/json"
            self._data = [response.model_dump_json().encode()]
        self._emit_chunk(is_last=True)

    async def _leave(self, task: "asyncio.Task[None]") -> None:
        """Let vLLM's handlers know that the client has left, so that they abort the request.

        Returns when the application has ended.
        """
        self._has_left.set()
        while not task.done():
            await asyncio.wait([task], timeout=END_S)
            task.cancel()

    def _emit_chunk(self, *, is_last: bool = False) -> None:
        """Emit a chunk with all tokens and bytes since the last chunk.

        This does nothing if the client has left or the request has failed.
        """
        if self._failure is not None or self._has_left.is_set():
            return
        tokens, data = tuple(self._token_ids), b"".join(self._data)
        if self._status >= 400:
            data = option_names.replaced(data)
        cached_tokens, written_tokens = self.counts or (0, 0)
        part = HttpPart(
            data,
            self._status,
            self._content_type,
            (len(tokens),) if tokens else (),
            written_tokens,
            self._can_continue,
        )
        self._token_ids, self._data, self._status, self._has_emitted = [], [], 0, True
        self._emit(Chunk(tokens, cached_tokens, is_last, part))

    # The engine, as vLLM's handlers use it.

    def outputs(
        self,
        llm: AsyncLLM,
        grammars: GrammarCheck,
        prompt: Any,
        params: SamplingParams,
        options: Mapping[str, Any],
    ) -> AsyncGenerator[RequestOutput, None]:
        """Return the engine's outputs for one prompt; vLLM's handlers would call AsyncLLM.generate.

        A response that is not streamed gets one output with all tokens. The engine always streams,
        so that chunks are emitted meanwhile.
        """
        self._prompts += 1
        is_final_only = params.output_kind is RequestOutputKind.FINAL_ONLY
        has_ids = prompt.get("type") in ("token", "multimodal")
        # A stream of /v1/responses ends with the log-probabilities of all its tokens. A replica
        # that continues the response does not have those of the first tokens.
        repeats_logprobs = self.call.path == RESPONSES and params.logprobs is not None
        allows_continuing = (
            is_on(CONTINUATION)
            and is_on(GRAMMARS)
            and not repeats_logprobs
            and can_continue(params)
        )
        # A recording can have several prompts, and its tokens need not be the whole answer.
        is_whole = self._prompts == 1 and self.call.upload is None
        self._can_continue = is_whole and has_ids and allows_continuing
        ours = hint_args(self.request) | step_args(self.request) | pull_args(self.request)
        deltas = _delta_params(params, ours)
        if is_final_only:
            deltas.stream_interval = UNSTREAMED_CHUNK_TOKENS
        outputs = self._outputs(llm, grammars, self.salted(prompt), deltas, options)
        return _merged(outputs) if is_final_only else outputs

    def salted(self, prompt: Any) -> Any:
        """Return the prompt with the router's cache salt. A salt in the body is ignored."""
        return salted(prompt, self.request)

    async def _outputs(
        self,
        llm: AsyncLLM,
        grammars: GrammarCheck,
        prompt: Any,
        params: SamplingParams,
        options: Mapping[str, Any],
    ) -> AsyncGenerator[RequestOutput, None]:
        # The preparation on this process's event loop ends here: the grammar is checked in another
        # process.
        prepared()
        await grammars.check(params)
        id_ = f"{self.request.request_id}-{self._prompts}"
        ids = prompt_ids(prompt)
        check_prompt_logprobs(params, len(ids or ()))
        if self.call.deltas and self._prompts == 1:
            answered = self.request.answered_ids.tolist()
            tokenizer = llm.get_tokenizer()
            for output in repeated_outputs(
                answered, self.call.deltas, prompt, params, id_, tokenizer
            ):
                yield self._counted(output)
            self._data, self._status = [], 0  # the client has already received these bytes
            # The offsets of images stay valid, because all images are before these tokens.
            prompt = {**prompt, "prompt_token_ids": [*(ids or ()), *answered]}
            params = remaining_params(params, answered)
        ours = {
            "lora_request": self._lora,
            "data_parallel_rank": self.request.rank,
            "priority": self.priority,
        }
        prompt_logprobs = None  # the prompt's log-probabilities, once an output has them
        outputs = llm.generate(prompt, params, id_, **{**options, **ours})
        async with self.reporting_a_dead_engine(), aclosing(outputs):
            with _outside():
                output = await anext(outputs, None)
            while output is not None:
                if ids is not None:
                    output.prompt_token_ids = ids
                check_tokens_fit_grammar(output, params)
                if params.n > 1:
                    # With `echo`, each choice begins with the prompt's log-probabilities. vLLM
                    # loses them if it merges a choice's first output into a later output of another
                    # choice.
                    prompt_logprobs = output.prompt_logprobs or prompt_logprobs
                    output.prompt_logprobs = prompt_logprobs
                for choice in output.outputs:
                    self._token_ids += choice.token_ids
                yield self._counted(output)
                if not output.finished:  # the last tokens and the response's end are in one chunk
                    self._emit_chunk()
                output = await anext(outputs, None)

    @asynccontextmanager
    async def reporting_a_dead_engine(self) -> AsyncIterator[None]:
        """Report the engine's death to the router, which continues the response at another replica.

        Otherwise the application would send an error to the client.
        """
        try:
            yield
        except VllmDeadError as error:
            self._failure = EngineDeadError(str(error))
            raise

    def _counted(self, output: RequestOutput) -> RequestOutput:
        """Set the output's numbers of cached tokens to those that the response reported first.

        If another replica has begun the response, these are that replica's numbers.
        """
        if self.counts is None:
            self.counts = output.num_cached_tokens or 0, output.num_cache_creation_tokens or 0
        output.num_cached_tokens, output.num_cache_creation_tokens = self.counts
        return output


class Rendering(RequestRun):
    """A request that is only rendered: the engine does not run it.

    The application is cancelled when it passes the first prompt to the engine.
    """

    def __init__(self, call: HttpCall) -> None:
        request, self._chunks = GenerateRequest("render-0", NO_TOKENS), list[Chunk]()
        call = msgspec.structs.replace(call, is_rendered=False)
        super().__init__(request, call, self._chunks.append)
        self.prompts: Sequence[Any] = ()  # all prompts of a completion, once vLLM has rendered them
        self._first: Any = None  # first prompt that the application has passed to the engine

    async def rendered(self, app: Any) -> Rendered:
        """Run the application until it calls the engine; return the prompts.

        If the application rejects the request, return its error response.
        """
        await self.respond(app)
        if self._first is None:
            return Rendered(refusal=self._chunks[-1].http)
        first, *more = map(rendered_of, self.prompts or [self._first])
        return msgspec.structs.replace(first, more=tuple(more))

    async def outputs(
        self,
        llm: AsyncLLM,
        grammars: GrammarCheck,
        prompt: Any,
        params: SamplingParams,
        options: Mapping[str, Any],
    ) -> AsyncGenerator[RequestOutput, None]:
        self._first = prompt
        raise asyncio.CancelledError  # no error handler catches this
        yield  # makes this method a generator


def rendered_of(prompt: Mapping[str, Any]) -> Rendered:
    """Convert a prompt that vLLM has rendered to a Rendered."""
    if prompt["type"] == "embeds":
        ids = [0] * len(prompt["prompt_embeds"])
        # The span is random, so that the prompt's fingerprints match no other prompt.
        media = [MediaSpan(secrets.token_hex(16), 0, len(ids))]
    else:
        ids, media = prompt["prompt_token_ids"], _media(prompt)
    packed = np.array(ids, "<u4").tobytes()
    return Rendered(packed, is_text=prompt["type"] == "token", media=tuple(media))


def _media(prompt: Mapping[str, Any]) -> list[MediaSpan]:
    if prompt["type"] != "multimodal":
        return []
    media = [
        MediaSpan(identifier, place.offset, place.length)
        for modality, places in prompt["mm_placeholders"].items()
        for identifier, place in zip(prompt["mm_hashes"][modality], places, strict=True)
    ]
    return sorted(media, key=lambda span: span.offset)


def _unwrapped(error: Exception) -> Exception:
    """Return the error of the application if Starlette has wrapped it in another error.

    Starlette does this for errors after the response's start.
    """
    cause, is_wrapper = error.__cause__, STARTED in str(error)
    return cause if is_wrapper and isinstance(cause, Exception) else error


def _is_of_validation(error: Exception) -> bool:
    """Return whether the error was raised during the validation of the body.

    Some of vLLM's validators expect an object or a list, and crash with any other value.
    """
    frames = traceback.walk_tb(error.__traceback__)
    return any(frame.f_code is request_body_to_args.__code__ for frame, _ in frames)


# The request of the running task; None outside the application.
CURRENT: ContextVar[RequestRun | None] = ContextVar("CURRENT", default=None)


def scope(path: str, headers: Mapping[str, str]) -> dict[str, Any]:
    """Return the ASGI scope of a POST request with a JSON body."""
    all_headers = {"content-type": "application/json", **headers}
    encoded = ((name.encode(), value.encode()) for name, value in all_headers.items())
    return post_scope(path, encoded)


@contextmanager
def _outside() -> Iterator[None]:
    """Run code outside the request, so that ids that the engine makes use other random numbers.

    The request's own random numbers are for the ids in its response (repeatable.py).
    """
    token = CURRENT.set(None)
    try:
        yield
    finally:
        CURRENT.reset(token)


def _delta_params(params: SamplingParams, ours: Mapping[str, Any]) -> SamplingParams:
    """Return a copy of the parameters for streaming.

    In extra_args, keys that begin with RESERVED are removed and the entries of `ours` are added.
    """
    params = params.clone()
    params.output_kind = RequestOutputKind.DELTA
    extra_args = params.extra_args or {}
    theirs = {key: value for key, value in extra_args.items() if not key.startswith(RESERVED)}
    params.extra_args = {**theirs, **ours} or None
    return params


async def _merged(
    outputs: AsyncGenerator[RequestOutput, None],
) -> AsyncGenerator[RequestOutput, None]:
    """Merge all outputs into one, as vLLM does with FINAL_ONLY."""
    merged: RequestOutput | None = None
    async with aclosing(outputs):
        async for output in outputs:
            if merged is None:
                merged = output
            else:
                merged.add(output, aggregate=True)
    if merged is not None:
        merged.outputs.sort(key=lambda choice: choice.index)
        yield merged
