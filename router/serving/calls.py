"""Calls that a replica's HTTP application answers: prompts, replicas, responses."""

import random
import secrets
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec
from fastapi import Response
from fastapi.responses import JSONResponse
from msgspec import Struct

from kvroute.blocks.fingerprint import Feature
from kvroute.contract.generation import TokenIds
from kvroute.contract.http_call import (
    HttpCall,
    HttpPart,
    encode_call,
    part_in,
    rendered_in,
)
from kvroute.router.api.calls import CHATS, COMPLETIONS, COUNT_TOKENS, MESSAGES, RESPONSES, Call
from kvroute.router.api.errors import DONE, ApiError, event, invalid, refusal_of_replica
from kvroute.router.dispatch.batch import batched
from kvroute.router.dispatch.dispatcher import Dispatcher, Generation
from kvroute.router.dispatch.relay import relayed, whole_response
from kvroute.router.dispatch.start import begin_all, placement_headers
from kvroute.router.placement.attempts import RequestContext
from kvroute.router.placement.fleet import Fleet
from kvroute.router.placement.receipts import RECEIPTS
from kvroute.router.prompts.chat_template import OnlyReplicaError
from kvroute.router.serving.image_homes import ImageHomes, first_image
from kvroute.router.serving.prefix_service import PrefixService
from kvroute.store.prefixes import Prefix
from kvroute.wire.structs import token_ids_of

WHOLE_S = 600.0  # for a replica to answer a call as a whole; it may have many texts to embed
NAMED_EVENTS = (RESPONSES, MESSAGES)  # routes whose streams have events with a name and a type
CHECKED = 100  # of so many prompts that a router has rendered, a replica renders one again
# Fields of a completion that change its prompt in a way that only a replica knows.
ONLY_REPLICAS = ("add_special_tokens", "prompt_embeds", "suffix", "truncate_prompt_tokens")

encode = msgspec.json.encode


class Prompted(Struct, frozen=True):
    """A call's prompts.

    is_rendered: the replica takes these token ids; otherwise it renders the body itself, and the
    ids only serve placement.
    """

    token_ids: Sequence[TokenIds]
    is_rendered: bool = True
    has_prefix: bool = False  # a named one, which is not in the body
    features: tuple[Feature, ...] = ()  # the only prompt's images and the like
    image: int | None = None  # a number for the first one; None: there is none


class RefusedCallError(Exception):
    """A replica's HTTP application refuses the body."""

    def __init__(self, refusal: HttpPart) -> None:
        self.refusal = refusal


class Calls:
    """One model's calls in one router."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        fleet: Fleet,
        prefixes: PrefixService,
        max_model_len: Callable[[], int],
    ) -> None:
        self._dispatcher = dispatcher
        self._fleet = fleet
        self._prefixes = prefixes
        self._max_model_len = max_model_len
        self._homes = ImageHomes()

    async def passed_on(self, call: Call, request_id: str) -> Response:
        """The response of any replica to a call that needs no placement."""
        http = msgspec.structs.replace(
            _http(call, call.raw), request_id=request_id, namespace=call.cache_salt
        )
        answer = await self._dispatcher.ask("http", encode_call(http), within_s=WHOLE_S)
        return whole_response(part_in(answer), path=call.path)

    async def counted(self, call: Call, generating: Call, prefix: Prefix) -> Response:
        """Return the tokens of the prompt that a generating call would have behind a prefix."""
        prompts = (await self.prompts(generating, prefix)).token_ids
        if len(prompts) != 1:
            raise invalid("prompt", f"prompt has {len(prompts)} texts; expected one")
        (ids,) = prompts
        if call.path == COUNT_TOKENS:
            context = {"original_input_tokens": len(ids)}
            return JSONResponse({"input_tokens": len(ids), "context_management": context})
        found = {"count": len(ids), "max_model_len": self._max_model_len(), "tokens": ids.tolist()}
        texts = None
        if call.body.get("return_token_strs") is True:
            texts = self._prefixes.composer.token_strings(ids)
        return JSONResponse({**found, "token_strs": texts})

    async def prompts(self, call: Call, prefix: Prefix | None) -> Prompted:
        """Rendered here where that is sure to be right; else by a replica. RefusedCallError."""
        has_prefix = prefix is not None
        is_rendered = has_prefix or not call.needs_prompt_text
        try:
            if call.path == CHATS:
                return Prompted([await self._chat(call, prefix)], is_rendered, has_prefix)
            if call.path == COMPLETIONS:
                return Prompted(await self._completions(call, prefix), is_rendered, has_prefix)
        except OnlyReplicaError as error:
            problem = str(error)
        else:
            problem = "routers do not render bodies of this route"
        prompted = await self._rendered(call, problem)
        return prompted if prefix is None else self._behind(prefix, prompted)

    async def respond(
        self,
        call: Call,
        prompted: Prompted,
        context: RequestContext,
        *,
        begun: Callable[[Generation], None],
        receipt: Callable[[Generation], object] | None,
    ) -> Response:
        """The response to a generating call. ApiError when one of its prompts cannot run."""
        prompts = prompted.token_ids
        asked = [
            (ids, self._http_call(call, number, prompted)) for number, ids in enumerate(prompts)
        ]
        generations = await begin_all(self._dispatcher, asked, context)
        for generation in generations:
            if not generation.is_refused:
                begun(generation)
        if prompted.image is not None:
            self._homes.answered(prompted.image, generations[0].replica_id)
        ending = partial(_with_receipts, call.path, generations, receipt) if receipt else _unchanged
        headers, failed = placement_headers(generations), partial(event, path=call.path)
        if len(generations) == 1:
            refused = partial(refusal_of_replica, path=call.path)
            return await relayed(
                generations[0], headers, ending=ending, failed=failed, refused=refused
            )
        return await batched(generations, headers, n=call.n, ending=ending, failed=failed)

    async def _chat(self, call: Call, prefix: Prefix | None) -> TokenIds:
        return await self._prefixes.composer.chat(
            call.body,
            prefix,
            self._fleet.replicas.content_format,
            max_model_len=self._max_model_len(),
        )

    async def _completions(self, call: Call, prefix: Prefix | None) -> list[TokenIds]:
        prompts = call.prompts()
        if prompts is None or any(call.body.get(name) is not None for name in ONLY_REPLICAS):
            raise OnlyReplicaError("prompt is no string, token ids, or list of such")
        try:
            return await self._prefixes.composer.completions(
                prompts, prefix, max_model_len=self._max_model_len()
            )
        except ApiError as error:
            if error.code == "context_length_exceeded" or prefix is not None:
                raise
            raise OnlyReplicaError(error.message) from error

    async def _rendered(self, call: Call, problem: str) -> Prompted:
        """problem: why a router does not render it."""
        http = msgspec.structs.replace(_http(call, call.raw), problem=problem)
        image = first_image(call.body)
        home = None if image is None else partial(self._homes.home, image)
        packed = await self._dispatcher.ask("render", encode_call(http), prefer=home)
        rendered = rendered_in(packed)
        if rendered.refusal is not None:
            raise RefusedCallError(rendered.refusal)
        each = (rendered, *rendered.more)
        return Prompted(
            [token_ids_of(prompt.token_ids) for prompt in each],
            all(prompt.is_text for prompt in each) and not call.needs_prompt_text,
            features=() if any(prompt.is_text for prompt in rendered.more) else rendered.features,
            image=image,
        )

    def _behind(self, prefix: Prefix, prompted: Prompted) -> Prompted:
        if "prompt" not in prefix.source or prompted.features:
            raise ApiError(
                400,
                f"prefix {prefix.label!r} cannot stand before this body: one that is declared as "
                "messages stands before chats of text only; declare it as a prompt",
                code="unsupported_parameter",
            )
        ids = [self._prefixes.composer.behind(prefix, each) for each in prompted.token_ids]
        return Prompted(ids, has_prefix=True)

    def _http_call(self, call: Call, number: int, prompted: Prompted) -> HttpCall:
        body = call.raw if len(prompted.token_ids) == 1 else call.with_prompt(number)
        is_own = prompted.is_rendered and not prompted.has_prefix
        is_checked = is_own and random.randrange(CHECKED) == 0
        return _http(call, body, is_rendered=prompted.is_rendered, is_checked=is_checked)


def placed_by(call: Call, prompted: Prompted) -> tuple[Feature, ...]:
    """By what its prompts are placed, besides their ids. Where the engine reads no cache, that is
    something which no replica has."""
    if call.reads_cache:
        return prompted.features
    return Feature(secrets.token_hex(16), 0, 1), *prompted.features


def _http(
    call: Call, body: bytes, *, is_rendered: bool = False, is_checked: bool = False
) -> HttpCall:
    return HttpCall(
        call.path,
        body,
        time.time(),
        is_rendered=is_rendered,
        is_checked=is_checked,
        is_stored=call.is_stored,
    )


def _unchanged(data: bytes) -> bytes:
    return data


def _with_receipts(
    path: str,
    generations: Sequence[Generation],
    receipt: Callable[[Generation], object],
    data: bytes,
) -> bytes:
    """A response's last bytes with the receipts: as a member of a whole body, or as an event."""
    receipts = {RECEIPTS: [receipt(generation) for generation in generations]}
    if data.startswith(b"{"):
        body: dict[str, Any] = msgspec.json.decode(data)
        return encode({**body, **receipts})
    if path in NAMED_EVENTS:
        event = b"event: kvroute.receipts\ndata: " + encode(
            {"type": "kvroute.receipts", **receipts}
        )
    else:
        event = b"data: " + encode({"object": "kvroute.receipts", "choices": [], **receipts})
    end = DONE if data.endswith(DONE) else b""
    return b"".join((data.removesuffix(DONE), event, b"\n\n", end))
