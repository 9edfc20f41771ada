"""Rendering: turns a call's prompts into token ids.

The router renders the bodies for which its result is certainly the same as vLLM's. A replica
renders all others with vLLM.
"""

import random
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import msgspec
from msgspec import Struct

from kvroute.blocks.fingerprint import MediaSpan
from kvroute.contract.generation import TokenIds
from kvroute.contract.http_call import HttpCall, HttpPart, decode_rendered, encode_call
from kvroute.features.opening import Opening
from kvroute.router.api.calls import CHAT_COMPLETIONS, COMPLETIONS, Call
from kvroute.router.api.errors import ApiError
from kvroute.router.dispatch.questions import Questions
from kvroute.router.placement.fleet import Fleet
from kvroute.router.prompts.chat_template import OnlyReplicaError
from kvroute.router.prompts.image_affinity import ImageAffinity, first_image
from kvroute.router.prompts.tokenizer import Prompts
from kvroute.wire.structs import token_ids_of

CHECKED = 100  # a replica renders one in this many prompts again, to detect differences
# Fields of a completion that change its prompt in a way that only vLLM can compute.
ONLY_REPLICAS = ("add_special_tokens", "prompt_embeds", "suffix", "truncate_prompt_tokens")


class RefusedCallError(Exception):
    """A replica's HTTP application refuses the body.

    Args:
        refusal: the application's response.
    """

    def __init__(self, refusal: HttpPart) -> None:
        self.refusal = refusal


class RenderedCall(Struct, frozen=True):
    """A call with the token ids of its prompts."""

    call: Call
    token_ids: Sequence[TokenIds]  # token ids of each prompt
    # True: the replica uses these token ids. False: it renders the body itself, and the token ids
    # are only used for placement.
    is_rendered: bool = True
    has_prefix: bool = False  # True: the prompts start with an opening, which the body lacks
    media: tuple[MediaSpan, ...] = ()  # images, videos and sounds; only if it has one prompt
    image: int | None = None  # a hash of the first image; None: there are no images

    @property
    def tokens(self) -> int:
        """Return the number of tokens of all prompts."""
        return sum(map(len, self.token_ids))

    def placed_media(self) -> tuple[MediaSpan, ...]:
        """Return the media from which the fingerprints for placement are computed.

        If the request must not read the cache, they include a random one, so that no replica
        has a hit.
        """
        if self.call.reads_cache:
            return self.media
        return MediaSpan(secrets.token_hex(16), 0, 1), *self.media

    def prompts(self) -> Iterator[tuple[TokenIds, HttpCall]]:
        """Yield each prompt's token ids, and the HTTP request that the replica gets with them."""
        is_single = len(self.token_ids) == 1
        bodies = iter([self.call.raw]) if is_single else self.call.with_each_prompt()
        for ids, body in zip(self.token_ids, bodies, strict=False):
            can_check = self.is_rendered and not self.has_prefix
            yield (
                ids,
                http_call(
                    self.call,
                    body,
                    is_rendered=self.is_rendered,
                    is_checked=can_check and random.randrange(CHECKED) == 0,
                    has_prefix=self.has_prefix,
                ),
            )


def http_call(
    call: Call,
    body: bytes,
    *,
    is_rendered: bool = False,
    is_checked: bool = False,
    has_prefix: bool = False,
) -> HttpCall:
    """Return the request for a replica's HTTP application.

    Args:
        body: the call's body, with only one of its prompts.
        is_rendered: whether the replica uses the router's token ids.
        is_checked: whether the replica renders the body as well, to compare the token ids.
        has_prefix: whether the token ids begin with an opening, which the body lacks.
    """
    return HttpCall(
        call.path,
        body,
        time.time(),
        is_rendered=is_rendered,
        is_checked=is_checked,
        is_stored=call.is_stored,
        has_prefix=has_prefix,
        variant=call.variant,
        features=dict(call.features),
    )


class Renderer:
    """Renders the calls for one model in one router."""

    def __init__(
        self,
        questions: Questions,
        fleet: Fleet,
        prompts: Prompts,
        image_affinity: ImageAffinity,
        *,
        max_model_len: Callable[[], int],
    ) -> None:
        self._questions = questions
        self._fleet = fleet
        self._prompts = prompts
        self._image_affinity = image_affinity
        self._max_model_len = max_model_len

    async def render(self, call: Call, opening: Opening | None) -> RenderedCall:
        """Return the call's prompts.

        Args:
            opening: the beginning that a feature adds to them.

        Raises:
            ApiError: a prompt is too long, or the opening cannot be used with it.
            RefusedCallError: a replica refuses the body.
        """
        has_prefix = opening is not None
        # If the response includes the prompt's text, vLLM has to render the body to get the text.
        # It cannot do so with an opening, since the body lacks it.
        is_rendered = has_prefix or not call.needs_prompt_text
        try:
            if call.path == CHAT_COMPLETIONS:
                ids = [await self._chat(call, opening)]
                return RenderedCall(call, ids, is_rendered, has_prefix)
            if call.path == COMPLETIONS:
                prompts = await self._completions(call, opening)
                return RenderedCall(call, prompts, is_rendered, has_prefix)
        except OnlyReplicaError as error:
            problem = str(error)
        else:
            problem = "routers do not render bodies of this route"
        rendered = await self._in_replica(call, problem)
        if opening is None:
            return rendered
        ids = opening.before(rendered.token_ids, has_media=bool(rendered.media))
        return RenderedCall(rendered.call, ids, has_prefix=True)

    async def _chat(self, call: Call, opening: Opening | None) -> TokenIds:
        return await (opening or self._prompts).chat(
            call.body, self._fleet.replicas.content_format, max_model_len=self._max_model_len()
        )

    async def _completions(self, call: Call, opening: Opening | None) -> list[TokenIds]:
        prompts = call.prompts()
        if prompts is None or any(call.body.get(name) is not None for name in ONLY_REPLICAS):
            raise OnlyReplicaError(
                "prompt is not a string, a list of token ids or a list of these, or the body has "
                f"one of the fields {', '.join(ONLY_REPLICAS)}"
            )
        try:
            return await (opening or self._prompts).completions(
                prompts, max_model_len=self._max_model_len()
            )
        except ApiError as error:
            if error.code == "context_length_exceeded" or opening is not None:
                raise
            raise OnlyReplicaError(error.message) from error

    async def _in_replica(self, call: Call, problem: str) -> RenderedCall:
        """Let a replica render the body.

        Args:
            problem: why the router cannot render it; the replica logs this.
        """
        http = msgspec.structs.replace(http_call(call, call.raw), problem=problem)
        image = first_image(call.body)
        prefer = None if image is None else partial(self._image_affinity.replica_for, image)
        packed = await self._questions.ask("render", encode_call(http), prefer=prefer)
        rendered = decode_rendered(packed)
        if rendered.refusal is not None:
            raise RefusedCallError(rendered.refusal)
        prompts = (rendered, *rendered.more)
        return RenderedCall(
            call,
            [token_ids_of(prompt.token_ids) for prompt in prompts],
            all(prompt.is_text for prompt in prompts) and not call.needs_prompt_text,
            media=() if any(prompt.is_text for prompt in rendered.more) else rendered.media,
            image=image,
        )
