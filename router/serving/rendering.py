"""Render: a call's prompts become token ids.

A router renders what it is sure to render as vLLM does. A replica renders the rest with vLLM.
"""

import random
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import msgspec
from msgspec import Struct

from kvroute.blocks.fingerprint import Feature
from kvroute.contract.generation import TokenIds
from kvroute.contract.http_call import HttpCall, HttpPart, decode_rendered, encode_call
from kvroute.router.api.calls import CHAT_COMPLETIONS, COMPLETIONS, Call
from kvroute.router.api.errors import ApiError
from kvroute.router.dispatch.questions import Questions
from kvroute.router.placement.fleet import Fleet
from kvroute.router.prompts.chat_template import OnlyReplicaError
from kvroute.router.prompts.composer import PrefixComposer
from kvroute.router.prompts.image_affinity import ImageAffinity, first_image
from kvroute.store.named_prefix import Prefix
from kvroute.wire.structs import token_ids_of

CHECKED = 100  # one in this many rendered prompts is rendered again by a replica
# Fields of a completion that change its prompt in a way that only a replica knows.
ONLY_REPLICAS = ("add_special_tokens", "prompt_embeds", "suffix", "truncate_prompt_tokens")


class RefusedCallError(Exception):
    """A replica's HTTP application refuses the body."""

    def __init__(self, refusal: HttpPart) -> None:
        self.refusal = refusal


class RenderedCall(Struct, frozen=True):
    """A call with the token ids of its prompts."""

    call: Call
    token_ids: Sequence[TokenIds]  # token ids of each prompt
    # The replica takes these token ids; otherwise it renders the body itself, and the ids only
    # serve placement.
    is_rendered: bool = True
    has_prefix: bool = False  # a named one, which is not in the body
    features: tuple[Feature, ...] = ()  # the only prompt's images and the like
    image: int | None = None  # a number for the first one; None: there is none

    @property
    def tokens(self) -> int:
        """Return the number of tokens of all prompts."""
        return sum(map(len, self.token_ids))

    def placed_features(self) -> tuple[Feature, ...]:
        """Return the features that the prompts are placed by.

        Where the engine reads no cache, one is among them that no replica has cached.
        """
        if self.call.reads_cache:
            return self.features
        return Feature(secrets.token_hex(16), 0, 1), *self.features

    def prompts(self) -> Iterator[tuple[TokenIds, HttpCall]]:
        """Yield each prompt's token ids, and the HTTP request that a replica gets with them."""
        is_one = len(self.token_ids) == 1
        for number, ids in enumerate(self.token_ids):
            body = self.call.raw if is_one else self.call.with_prompt(number)
            is_own = self.is_rendered and not self.has_prefix
            yield (
                ids,
                http_call(
                    self.call,
                    body,
                    is_rendered=self.is_rendered,
                    is_checked=is_own and random.randrange(CHECKED) == 0,
                ),
            )


def http_call(
    call: Call, body: bytes, *, is_rendered: bool = False, is_checked: bool = False
) -> HttpCall:
    """Return the request to a replica's HTTP application; body: of one of the call's prompts."""
    return HttpCall(
        call.path,
        body,
        time.time(),
        is_rendered=is_rendered,
        is_checked=is_checked,
        is_stored=call.is_stored,
    )


class Renderer:
    """Renders the calls for one model in one router."""

    def __init__(
        self,
        questions: Questions,
        fleet: Fleet,
        composer: PrefixComposer,
        image_affinity: ImageAffinity,
        *,
        max_model_len: Callable[[], int],
    ) -> None:
        self._questions = questions
        self._fleet = fleet
        self._composer = composer
        self._image_affinity = image_affinity
        self._max_model_len = max_model_len

    async def render(self, call: Call, prefix: Prefix | None) -> RenderedCall:
        """Return the call's prompts.

        Raises:
            ApiError: a prompt is too long, or the prefix cannot stand before it.
            RefusedCallError: a replica refuses the body.
        """
        has_prefix = prefix is not None
        is_rendered = has_prefix or not call.needs_prompt_text
        try:
            if call.path == CHAT_COMPLETIONS:
                ids = [await self._chat(call, prefix)]
                return RenderedCall(call, ids, is_rendered, has_prefix)
            if call.path == COMPLETIONS:
                prompts = await self._completions(call, prefix)
                return RenderedCall(call, prompts, is_rendered, has_prefix)
        except OnlyReplicaError as error:
            problem = str(error)
        else:
            problem = "routers do not render bodies of this route"
        rendered = await self._in_replica(call, problem)
        return rendered if prefix is None else self._behind(prefix, rendered)

    async def _chat(self, call: Call, prefix: Prefix | None) -> TokenIds:
        return await self._composer.chat(
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
            return await self._composer.completions(
                prompts, prefix, max_model_len=self._max_model_len()
            )
        except ApiError as error:
            if error.code == "context_length_exceeded" or prefix is not None:
                raise
            raise OnlyReplicaError(error.message) from error

    async def _in_replica(self, call: Call, problem: str) -> RenderedCall:
        """Have a replica render the body; problem: why a router does not."""
        http = msgspec.structs.replace(http_call(call, call.raw), problem=problem)
        image = first_image(call.body)
        home = None if image is None else partial(self._image_affinity.replica_for, image)
        packed = await self._questions.ask("render", encode_call(http), prefer=home)
        rendered = decode_rendered(packed)
        if rendered.refusal is not None:
            raise RefusedCallError(rendered.refusal)
        each = (rendered, *rendered.more)
        return RenderedCall(
            call,
            [token_ids_of(prompt.token_ids) for prompt in each],
            all(prompt.is_text for prompt in each) and not call.needs_prompt_text,
            features=() if any(prompt.is_text for prompt in rendered.more) else rendered.features,
            image=image,
        )

    def _behind(self, prefix: Prefix, rendered: RenderedCall) -> RenderedCall:
        if "prompt" not in prefix.source or rendered.features:
            raise ApiError(
                400,
                f"prefix {prefix.label!r} cannot stand before this body: one that is declared as "
                "messages stands before chats of text only; declare it as a prompt",
                code="unsupported_parameter",
            )
        ids = [self._composer.after_prefix(prefix, token_id) for token_id in rendered.token_ids]
        return RenderedCall(rendered.call, ids, has_prefix=True)
