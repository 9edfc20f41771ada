"""One HTTP request in vLLM's application: what it gets, and the chunks that its response becomes.

The application runs over ASGI in a task of its own and reads the engine through `outputs`. A chunk
is one output of the engine with all bytes that the application sends until it asks for the next
one. So the tokens and the bytes that a router has always belong together, and another replica can
go on behind them. The application's task itself hands each chunk on.
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
from vllm.exceptions import VLLMValidationError
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError as VllmDeadError

from kvroute.blocks.fingerprint import Feature
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
from kvroute.replica.vllm_engine.blocks.cache_salt import cache_salt
from kvroute.replica.vllm_engine.blocks.keeping import keep_args
from kvroute.replica.vllm_engine.core.continued import can_continue, repeated, rest
from kvroute.replica.vllm_engine.core.priority import priority_of
from kvroute.replica.vllm_engine.grammar.check import GrammarCheck

log = logging.getLogger("kvroute.replica")

WHOLE_TOKENS = 32  # in a chunk of a response that is sent as a whole: what a lost replica may cost
# Log-probabilities of a prompt, which the replica's loop makes all at once: 6 us of CPU time each.
MOST_PROMPT_LOGPROBS = 131_072
END_S = 5.0  # for the application to end once the client has left
OURS = "kvroute_"  # how names in extra_args begin that clients may not set
RESPONSES = "/v1/responses"
ERROR_EVENT = b"event: error"
STARTED = "response already started"  # in the text of Starlette's RuntimeError

Message = Mapping[str, Any]  # ASGI's


class Run:
    """One request. lora: vLLM's argument for its adapter."""

    def __init__(
        self, request: GenerateRequest, call: HttpCall, emit: Emit, lora: Any = None
    ) -> None:
        self.call = call
        self.random = random.Random(request.request_id)  # the same numbers on every replica
        self.request = request
        self.priority = priority_of(request)  # whatever the body says
        self._lora = lora
        self._body: bytes | None = call.body  # until it was read
        self._has_left = asyncio.Event()  # the client
        self._emit = emit
        self._failure: Exception | None = None
        self._token_ids: list[int] = []  # generated since the last chunk
        self._data: list[bytes] = []  # sent since the last chunk
        self._has_put = False  # a chunk was emitted
        self._status = 0  # 0: a chunk has it
        self._content_type = ""
        self._prompts = 0  # that the engine was asked to answer
        self._can_continue = True
        self._counts: tuple[int, int] | None = None  # cached and written tokens of the prompt
        if call.deltas:
            self._counts = call.cached_tokens, call.written_tokens

    async def respond(self, app: Any) -> None:
        """Runs the application. Cancelling it aborts the request at the engine."""
        task = asyncio.create_task(self._run(app))
        try:
            await asyncio.wait([task])
        finally:
            await self._leave(task)
        if self._failure is not None:
            raise self._failure

    # ASGI.

    async def receive(self) -> Message:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._has_left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = int(message["status"])
            self._content_type = content_type(message)
        elif body := message.get("body"):
            if body.startswith(ERROR_EVENT):  # of /v1/messages; Anthropic has other types
                body = body.replace(b'"type":"internal_error"', b'"type":"api_error"')
            self._data.append(body)

    async def _run(self, app: Any) -> None:
        CURRENT.set(self)
        try:
            headers = {"x-request-id": client_id(self.request.request_id)}
            headers |= self.request.trace or {}
            await app(scope(self.call.path, headers), self.receive, self.send)
            self._put(is_last=True)
        except Exception as error:  # any of the application's
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        """End with an error response if the client has nothing yet; else fail with the error."""
        if self._failure is not None or self._has_put or self.call.deltas:
            self._failure = self._failure or error
            return
        log.warning("vLLM's application failed with %s", self.call.path, exc_info=error)
        is_body = _is_of_validation(error)
        if is_body or self._status < 400:  # else the application has made a response itself
            shown = f"a field of the body has a value of a wrong type: {error}"
            made = create_error_response(shown if is_body else _unwrapped(error))
            self._status, self._content_type = made.error.code, "application/json"
            self._data = [made.model_dump_json().encode()]
        self._put(is_last=True)

    async def _leave(self, task: "asyncio.Task[None]") -> None:
        """vLLM's handlers notice that the client has left, and abort the request."""
        self._has_left.set()
        while not task.done():
            await asyncio.wait([task], timeout=END_S)
            task.cancel()

    def _put(self, *, is_last: bool = False) -> None:
        """Emits all that came since the last chunk, while somebody reads it."""
        if self._failure is not None or self._has_left.is_set():
            return
        tokens, data = tuple(self._token_ids), b"".join(self._data)
        cached_tokens, written_tokens = self._counts or (0, 0)
        part = HttpPart(
            data,
            self._status,
            self._content_type,
            (len(tokens),) if tokens else (),
            written_tokens,
            self._can_continue,
        )
        self._token_ids, self._data, self._status, self._has_put = [], [], 0, True
        self._emit(Chunk(tokens, cached_tokens, is_last, part))

    # What vLLM's handlers ask the engine.

    def outputs(
        self,
        llm: AsyncLLM,
        grammars: GrammarCheck,
        prompt: Any,
        params: SamplingParams,
        options: Mapping[str, Any],
    ) -> AsyncGenerator[RequestOutput, None]:
        """Replace AsyncLLM.generate."""
        self._prompts += 1
        is_whole = params.output_kind is RequestOutputKind.FINAL_ONLY
        has_ids = prompt["type"] in ("token", "multimodal")
        repeats_logprobs = self.call.path == RESPONSES and params.logprobs is not None  # at its end
        is_kept = not repeats_logprobs and can_continue(params)
        self._can_continue = self._prompts == 1 and has_ids and is_kept
        deltas = _delta_params(params, keep_args(self.request))
        if is_whole:
            deltas.stream_interval = WHOLE_TOKENS
        outputs = self._outputs(llm, grammars, self.salted(prompt), deltas, options)
        return _whole(outputs) if is_whole else outputs

    def salted(self, prompt: Any) -> Any:
        """With the router's salt, whatever the body says."""
        salt = cache_salt(self.request)
        return {**prompt, "cache_salt": salt} if salt else prompt

    async def _outputs(
        self,
        llm: AsyncLLM,
        grammars: GrammarCheck,
        prompt: Any,
        params: SamplingParams,
        options: Mapping[str, Any],
    ) -> AsyncGenerator[RequestOutput, None]:
        prepared()  # another process checks the grammar
        await grammars.check(params)
        id_ = f"{self.request.request_id}-{self._prompts}"
        ids = prompt["prompt_token_ids"]
        _check_prompt_logprobs(params, len(ids or ()))
        if self.call.deltas and self._prompts == 1:
            answered = self.request.answered_ids.tolist()
            tokenizer = llm.get_tokenizer()
            for output in repeated(answered, self.call.deltas, prompt, params, id_, tokenizer):
                yield self._counted(output)
            self._data, self._status = [], 0  # the client has it
            prompt = {**prompt, "prompt_token_ids": [*ids, *answered]}  # images stand before
            params = rest(params, answered)
        ours = {
            "lora_request": self._lora,
            "data_parallel_rank": self.request.rank,
            "priority": self.priority,
        }
        prompt_logprobs = None  # of the prompt's tokens, once the engine has told them
        outputs = llm.generate(prompt, params, id_, **{**options, **ours})
        async with self.reporting_a_dead_engine(), aclosing(outputs):
            with _outside():
                output = await anext(outputs, None)
            while output is not None:
                output.prompt_token_ids = ids
                _check_tokens_fit_grammar(output, params)
                if params.n > 1:  # vLLM loses a choice's own when its first output is joined to a
                    # later one of another choice; with `echo`, each choice begins with them
                    prompt_logprobs = output.prompt_logprobs or prompt_logprobs
                    output.prompt_logprobs = prompt_logprobs
                for choice in output.outputs:
                    self._token_ids += choice.token_ids
                yield self._counted(output)
                if not output.finished:  # the last tokens go with the response's end
                    self._put()
                output = await anext(outputs, None)

    @asynccontextmanager
    async def reporting_a_dead_engine(self) -> AsyncIterator[None]:
        """The router is told, and goes on elsewhere; the application would answer with an error."""
        try:
            yield
        except VllmDeadError as error:
            self._failure = EngineDeadError(str(error))
            raise

    def _counted(self, output: RequestOutput) -> RequestOutput:
        """With the cached tokens that the first replica found."""
        if self._counts is None:
            self._counts = output.num_cached_tokens or 0, output.num_cache_creation_tokens or 0
        output.num_cached_tokens, output.num_cache_creation_tokens = self._counts
        return output


class Rendering(Run):
    """A request of which only the prompts are wanted. The application is stopped when it asks the
    engine."""

    def __init__(self, call: HttpCall) -> None:
        request, self._chunks = GenerateRequest("render-0", NO_TOKENS), list[Chunk]()
        call = msgspec.structs.replace(call, is_rendered=False)
        super().__init__(request, call, self._chunks.append)
        self.prompts: Sequence[Any] = ()  # all of a completion's, once vLLM has rendered them
        self._asked: Any = None  # the prompt that the engine was asked to answer first

    async def rendered(self, app: Any) -> Rendered:
        """Run the application until it asks the engine; return the prompts, or the refusal."""
        await self.respond(app)
        if self._asked is None:
            return Rendered(refusal=self._chunks[-1].http)
        first, *more = map(rendered_of, self.prompts or [self._asked])
        return msgspec.structs.replace(first, more=tuple(more))

    async def outputs(
        self,
        llm: AsyncLLM,
        grammars: GrammarCheck,
        prompt: Any,
        params: SamplingParams,
        options: Mapping[str, Any],
    ) -> AsyncGenerator[RequestOutput, None]:
        self._asked = prompt
        raise asyncio.CancelledError  # past every handler of errors
        yield  # this makes it a generator


def rendered_of(prompt: Mapping[str, Any]) -> Rendered:
    """Return what a router has to know of one of vLLM's prompts."""
    if prompt["type"] == "embeds":
        ids = [0] * len(prompt["prompt_embeds"])
        features = [Feature(secrets.token_hex(16), 0, len(ids))]  # nothing else has them
    else:
        ids, features = prompt["prompt_token_ids"], _features(prompt)
    packed = np.array(ids, "<u4").tobytes()
    return Rendered(packed, is_text=prompt["type"] == "token", features=tuple(features))


def _features(prompt: Mapping[str, Any]) -> list[Feature]:
    if prompt["type"] != "multimodal":
        return []
    found = [
        Feature(identifier, place.offset, place.length)
        for modality, places in prompt["mm_placeholders"].items()
        for identifier, place in zip(prompt["mm_hashes"][modality], places, strict=True)
    ]
    return sorted(found, key=lambda feature: feature.offset)


def _unwrapped(error: Exception) -> Exception:
    """Return the error that Starlette has wrapped, as it came behind a response's beginning."""
    cause, is_wrapper = error.__cause__, STARTED in str(error)
    return cause if is_wrapper and isinstance(cause, Exception) else error


def _is_of_validation(error: Exception) -> bool:
    """Return whether vLLM's checks of a body have failed, which expect objects or lists there."""
    frames = traceback.walk_tb(error.__traceback__)
    return any(frame.f_code is request_body_to_args.__code__ for frame, _ in frames)


# The request that the running task works on; None outside the application.
CURRENT: ContextVar[Run | None] = ContextVar("CURRENT", default=None)


def scope(path: str, headers: Mapping[str, str]) -> dict[str, Any]:
    """ASGI's, of a POST request with a JSON body."""
    all_headers = {"content-type": "application/json", **headers}
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(name.encode(), value.encode()) for name, value in all_headers.items()],
        "client": None,
        "server": None,
        "state": {},
    }


def content_type(message: Message) -> str:
    """Of an http.response.start."""
    for name, value in message["headers"]:
        if name.lower() == b"content-type":
            return str(value, "latin-1")
    return ""


@contextmanager
def _outside() -> Iterator[None]:
    """The engine draws ids of its own at first, which must not use up the request's."""
    token = CURRENT.set(None)
    try:
        yield
    finally:
        CURRENT.reset(token)


def _check_prompt_logprobs(params: SamplingParams, tokens: int) -> None:
    if params.prompt_logprobs is None:
        return
    values = tokens * (params.prompt_logprobs + 1)
    if values > MOST_PROMPT_LOGPROBS:
        raise VLLMValidationError(
            f"{values} log-probabilities of the prompt are asked for: prompt_logprobs (with echo: "
            f"logprobs) and one more, for each of {tokens} tokens. The limit is "
            f"{MOST_PROMPT_LOGPROBS}; ask for fewer, or send a shorter prompt",
            parameter="prompt_logprobs",
        )


def _check_tokens_fit_grammar(output: RequestOutput, params: SamplingParams) -> None:
    """Refuse a request whose limits on tokens leave none that its grammar allows.

    The engine ends such a request with an error that names no cause.
    """
    limits = {
        "allowed_token_ids": params.allowed_token_ids,
        "bad_words": params.bad_words,
        "logit_bias": params.logit_bias,
    }
    given = [name for name, value in limits.items() if value]
    if not given or params.structured_outputs is None:
        return
    if any(choice.finish_reason == "error" for choice in output.outputs):
        raise VLLMValidationError(
            f"{' and '.join(given)}: the allowed tokens do not fit the schema or grammar of the "
            "answer; allow more tokens, or leave one of them out",
            parameter=given[0],
        )


def _delta_params(params: SamplingParams, ours: Mapping[str, Any]) -> SamplingParams:
    """A copy, for outputs as they come; only kvroute itself may ask what is in `ours`."""
    params = params.clone()
    params.output_kind = RequestOutputKind.DELTA
    extra_args = params.extra_args or {}
    theirs = {k: v for k, v in extra_args.items() if not k.startswith(OURS)}
    params.extra_args = {**theirs, **ours} or None
    return params


async def _whole(
    outputs: AsyncGenerator[RequestOutput, None],
) -> AsyncGenerator[RequestOutput, None]:
    """All outputs as one, as FINAL_ONLY gives them."""
    whole: RequestOutput | None = None
    async with aclosing(outputs):
        async for output in outputs:
            if whole is None:
                whole = output
            else:
                whole.add(output, aggregate=True)
    if whole is not None:
        whole.outputs.sort(key=lambda choice: choice.index)
        yield whole
