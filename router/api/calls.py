"""Parses the fields of a request's body that a router needs.

The replica's HTTP application checks all fields. A router reads only the fields that it needs to
find the prompt and a replica for it. It also refuses bodies that could delay or harm other
requests.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from kvroute.contract.generation import TokenIds
from kvroute.features import ONCE
from kvroute.features.gate import ANYONE, Caller
from kvroute.router.api.call_limits import (
    MAX_CHOICES,
    MAX_N,
    check_copies,
    check_count,
    check_grammars,
    check_lengths,
    check_media_options,
    check_name,
    check_template_kwargs,
    check_values,
)
from kvroute.router.api.errors import invalid, shown, unsupported
from kvroute.router.api.parsing import BOM, json_object, read_as_vllm_does

CHAT_COMPLETIONS = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
TOKENIZE = "/tokenize"
COUNT_TOKENS = "/v1/messages/count_tokens"
INPUT_TOKENS = "/v1/responses/input_tokens"
INVOCATIONS = "/invocations"  # SageMaker's route, where the fields of the body select the task
# Routes that any replica can answer, because they do not use the engine's KV cache.
STATELESS_ROUTES = (
    TOKENIZE,
    "/detokenize",
    COUNT_TOKENS,
    INPUT_TOKENS,
    "/v1/embeddings",
    "/v2/embed",  # Cohere's form of embeddings
    "/rerank",
    "/v1/rerank",
    "/v2/rerank",
    "/score",
    "/v1/score",
    "/classify",
    "/pooling",
    INVOCATIONS,
)

# A part of a message can have an image, a video or a sound in one of these fields.
MEDIA = (
    *("image_url", "image_pil", "image_embeds", "video_url", "video_embeds"),
    *("audio_url", "audio_embeds", "input_audio"),
)
PROMPT_FIELDS = ("prompt", "prompt_embeds")  # fields of a completion that have its prompts
# Fields with which the response includes the prompt's text.
WITH_PROMPT_TEXT = ("echo", "return_prompt_text", "enable_response_messages")
# Fields that are refused, unless a feature has them. With them, a client could replace the prompt
# after routing, or use the GPU after its request has ended.
REFUSED_FIELDS = ("kv_transfer_params", "ec_transfer_params", "background")
# Fields of a body, and types of a message's parts, that /v1/messages has and chats do not have.
MESSAGES_FIELDS = frozenset({"system", "stop_sequences"})
MESSAGES_PARTS = frozenset({"tool_use", "tool_result"})


class Call(Struct, frozen=True):
    """A request to one of the routes above, with its parsed body."""

    path: str
    raw: bytes  # the body as the client sent it; empty if it is a form
    body: Mapping[str, Any]  # the parsed body; for a form, the fields that a router uses
    caller: Caller = ANYONE  # the sender
    is_stored: bool = False  # the response will be stored
    headers: Mapping[str, str] = {}  # the headers that features read (Feature.headers)
    # The response should include receipts, which explain to which replica each prompt was sent.
    wants_receipts: bool = False
    variant: str = ""  # the variant of the model that `model` names; see Scope
    features: Mapping[str, bytes] = {}  # name of a feature -> its data for replicas

    @property
    def model(self) -> str | None:
        model = self.body.get("model")
        return model if isinstance(model, str) else None

    @property
    def cache_salt(self) -> str:
        """Return the salt of the prompts' blocks: they are shared only between equal salts.

        It combines the tenant's salt and the body's.
        """
        return self.caller.salted(self.body.get("cache_salt") or "")

    def as_generating(self) -> "Call | None":
        """Return the generating call that would have this call's prompt.

        Returns:
            None if this call's route is not one that counts a prompt's tokens.
        """
        if self.path == COUNT_TOKENS:
            thinking = self.body.get("thinking")
            budget = thinking.get("budget_tokens") if isinstance(thinking, dict) else None
            # vLLM requires max_tokens to be larger than the budget for thinking.
            max_tokens = budget + 1 if type(budget) is int else 1
            raw = msgspec.json.encode({**self.body, "max_tokens": max_tokens})
            return replace(self, path=MESSAGES, raw=raw)
        if self.path == INPUT_TOKENS:
            return replace(self, path=RESPONSES)
        if self.path == TOKENIZE:
            return replace(self, path=CHAT_COMPLETIONS if "messages" in self.body else COMPLETIONS)
        return None

    def with_caller(self, caller: Caller) -> "Call":
        """Return the call with its caller.

        Raises:
            ApiError: an image has a uuid, although there are tenants. In vLLM, a tenant that knows
                the uuid could use the image of another tenant, or replace it.
        """
        if caller.tenant and next(_named_parts(self.raw, self.body), None):
            raise unsupported(
                "uuid",
                "an image has a uuid, which is not supported with API keys; leave uuid out",
            )
        return replace(self, caller=caller)

    @property
    def n(self) -> int:
        """Return the number of choices for each prompt."""
        n = self.body.get("n")
        return n if type(n) is int and n > 0 else 1

    @property
    def reads_cache(self) -> bool:
        """Return whether the engine can reuse cached blocks for the prompt.

        If the client wants log-probabilities of the prompt's tokens, the engine computes all of it.
        """
        if self.body.get("prompt_logprobs") is not None:
            return False
        logprobs = {CHAT_COMPLETIONS: "top_logprobs", COMPLETIONS: "logprobs"}.get(self.path, "")
        return not self.body.get("echo") or self.body.get(logprobs) is None

    def prompts(self) -> list[str] | list[TokenIds] | None:
        """Return a completion's prompts, or None if they are not valid."""
        prompt = self.body.get("prompt")
        if isinstance(prompt, str | np.ndarray):
            return [prompt]  # type: ignore[return-value]
        return prompt if isinstance(prompt, list) and prompt and _has_one_type(prompt) else None

    @property
    def prompt_count(self) -> int:
        """Return the number of a completion's prompts, including those that are embeddings."""
        embeds, prompts = _listed(self.body.get("prompt_embeds")), _listed(self.body.get("prompt"))
        return len(embeds) + len(prompts)

    @property
    def needs_prompt_text(self) -> bool:
        """Return whether the response includes the prompt's text. vLLM takes it from the body."""
        return any(self.body.get(name) is True for name in WITH_PROMPT_TEXT)

    def with_each_prompt(self) -> Iterator[bytes]:
        """Yield, for each prompt, the body with only this prompt.

        All other fields keep the bytes that the client sent. As in vLLM, the prompts in
        prompt_embeds come first.
        """
        fields = msgspec.json.decode(self.raw, type=dict[str, msgspec.Raw])
        others = {name: raw for name, raw in fields.items() if name not in PROMPT_FIELDS}
        for embeds in _listed(self.body.get("prompt_embeds")):
            yield msgspec.json.encode({**others, "prompt_embeds": embeds})
        for prompt in _listed(self.body.get("prompt")):
            encodable = prompt.tolist() if isinstance(prompt, np.ndarray) else prompt
            yield msgspec.json.encode({**others, "prompt": encodable})


def parse_call(path: str, raw: bytes) -> Call:
    """Parse the body of a request to the route `path`.

    Raises:
        ApiError: the body is not a JSON object, or it could harm a replica.
    """
    raw = raw.removeprefix(BOM)
    body = json_object(raw)
    read_as_vllm_does(body)
    for name in REFUSED_FIELDS:
        if body.get(name) and name not in ONCE.get(path, ()):
            raise unsupported(
                name, f"{name} is {shown(body[name])}, which is not supported; leave {name} out"
            )
    check_template_kwargs(body.get("chat_template_kwargs"))
    check_media_options(body)
    check_name("cache_salt", body.get("cache_salt"))
    messages = body.get("messages")
    is_chat = path in (CHAT_COMPLETIONS, MESSAGES)
    if is_chat and messages is not None and not isinstance(messages, list):
        raise invalid("messages", f"messages is {shown(messages)}; expected a list of messages")
    check_count("n", body.get("n"), MAX_N)
    given = body.get("input")
    has_token_input = (
        path in STATELESS_ROUTES and isinstance(given, list) and bool(_token_ids(given))
    )
    check_lengths(body, has_token_input=has_token_input)
    prompt = body.get("prompt")
    if path == COMPLETIONS and isinstance(prompt, list):
        body["prompt"] = _compact(prompt)
    check_values(body)
    check_grammars(body)
    _check_images(raw, body)
    call = Call(path, raw, body)
    choices = call.n * (max(1, call.prompt_count) if path == COMPLETIONS else 1)
    if choices > MAX_CHOICES:
        message = f"the prompts and n make {choices} choices; the limit is {MAX_CHOICES}"
        raise invalid("prompt", message)
    prompts = call.prompt_count if path == COMPLETIONS else 1
    check_copies(body, prompts=prompts, body_bytes=len(raw))
    return call


def parse_any(raw: bytes) -> Call:
    """Parse the body of a generating request. The body's fields show which route it is for."""
    return parse_call(_route_of(json_object(raw)), raw)


def parse_invocation(raw: bytes) -> Call:
    """Parse the body of /invocations: a chat, a completion, or a call of a pooling model."""
    body = json_object(raw.removeprefix(BOM))
    if "messages" in body:
        return parse_call(CHAT_COMPLETIONS, raw)
    is_completion = not body.keys().isdisjoint(PROMPT_FIELDS)
    return parse_call(COMPLETIONS if is_completion else INVOCATIONS, raw)


def _route_of(body: Mapping[str, Any]) -> str:
    """Return the generating route that a body with these fields is for."""
    if "messages" not in body:
        return RESPONSES if "input" in body else COMPLETIONS
    tools, contents = objects(body.get("tools")), message_parts(body)
    is_message = (
        not MESSAGES_FIELDS.isdisjoint(body)
        or any("input_schema" in tool for tool in tools)
        or any(str(part.get("type")) in MESSAGES_PARTS for part in contents)
    )
    return MESSAGES if is_message else CHAT_COMPLETIONS


def message_parts(body: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the parts of a body's messages, in order. Only content that is a list has parts."""
    for field in ("messages", "input"):
        for message in objects(body.get(field)):
            yield from objects(message.get("content"))


def objects(value: object) -> Iterator[Mapping[str, Any]]:
    """Yield the objects in a list. Yield nothing if the value is not a list."""
    if isinstance(value, list):
        yield from (item for item in value if isinstance(item, dict))


def _named_parts(raw: bytes, body: Mapping[str, Any]) -> Iterator[tuple[str, Any, object]]:
    """Yield the field, its value and the uuid of each image, video or sound that has a uuid."""
    if b"uuid" not in raw and b"\\u" not in raw:  # no part has a uuid, not even with escapes
        return
    for part in message_parts(body):
        if part.get("uuid") is not None:
            yield from ((name, part[name], part["uuid"]) for name in MEDIA if name in part)


def _check_images(raw: bytes, body: Mapping[str, Any]) -> None:
    """Check the uuids of images.

    A uuid must be short, because it is hashed with each block of its image. The image must be there
    too: an image with only a uuid would have to be cached already at the chosen replica.

    Raises:
        ApiError: a uuid is not valid, or its image is missing.
    """
    for field, value, uuid in _named_parts(raw, body):
        check_name("uuid", uuid)
        if value is None or value == {"url": None}:
            raise invalid(
                field, f"{field} is null, with the uuid {shown(uuid)}; send the image each time"
            )


def _compact(prompt: Sequence[Any]) -> Any:
    """Return a prompt with lists of token ids as arrays, which take a tenth of the memory.

    Return other prompts unchanged.
    """
    if ids := _token_ids(prompt):
        return ids[0]
    lists = [item for item in prompt if isinstance(item, list)]
    if len(lists) == len(prompt) <= MAX_CHOICES:
        arrays = [array for ids in lists for array in _token_ids(ids)]
        if len(arrays) == len(prompt):
            return arrays
    return prompt


def _token_ids(given: Sequence[Any]) -> list[TokenIds]:
    """Return a list with the token ids as one array, or an empty list for other values."""
    if not given or not all(type(item) is int and 0 <= item < 2**32 for item in given):
        return []
    return [np.array(given, np.uint32)]


def _listed(given: Any) -> Sequence[Any]:
    """Return the prompts as a list, which is empty for null."""
    if given is None:
        return []
    is_single = not isinstance(given, list) or _token_ids(given)
    return [given] if is_single else given


def _has_one_type(prompts: Sequence[Any]) -> bool:
    types = {type(prompt) for prompt in prompts}
    return types <= {str} or types <= {np.ndarray}
