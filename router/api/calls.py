"""A request that a replica's HTTP application answers, as far as a router has to read it.

The application checks the fields. A router takes what it needs to find the prompt and its replica,
and refuses what would hold up others.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct
from msgspec.structs import replace
from pydantic import TypeAdapter, ValidationError

from kvroute.contract.generation import TokenIds
from kvroute.contract.prefix_id import PrefixId
from kvroute.keys.keyring import Caller, owner, salted
from kvroute.router.api.declaration import MAX_MESSAGES
from kvroute.router.api.errors import ApiError, invalid, shown, unsupported
from kvroute.router.api.media_options import check_media_options
from kvroute.router.api.parsing import BOM, json_object
from kvroute.router.api.typed_fields import read_as_vllm_does

CHATS = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
TOKENIZE = "/tokenize"
COUNT_TOKENS = "/v1/messages/count_tokens"
INVOCATIONS = "/invocations"  # SageMaker's: the body says what it asks for
# Any replica answers them, without its engine's KV cache.
PASSED_ON = (
    TOKENIZE,
    "/detokenize",
    COUNT_TOKENS,
    "/v1/embeddings",
    "/rerank",
    "/v1/rerank",
    "/v2/rerank",
    "/score",
    "/v1/score",
    "/classify",
    "/pooling",
    INVOCATIONS,
)

MAX_N = 128
MAX_CHOICES = 1024  # prompts times n in one request
MAX_VALUES = 100_000  # JSON values of a body, next to token ids; a replica parses them on its loop
MAX_NAME = 256  # characters
MAX_COPIED = 16 << 20  # bytes of the fields next to the prompts, of which each prompt gets a copy
# Fields of a message's part that have an image, a video or a sound; vLLM takes a uuid beside them.
MEDIA = (
    *("image_url", "image_pil", "image_embeds", "video_url", "video_embeds"),
    *("audio_url", "audio_embeds", "input_audio"),
)
# Lists of which each item takes a replica's loop 100 us; of the scoring routes, it is a prompt.
SCORED = ("documents", "queries", "items", "data_1", "data_2", "text_1", "text_2")
# Each token of an answer is compared with every stop string, and every bad word is tokenised, on
# the replica's loop. vLLM's engines on GPUs have places for so many ids, and die of more.
MOST_ITEMS = {
    "messages": MAX_MESSAGES,
    **dict.fromkeys(("input", *SCORED), 4096),
    "tools": 1024,
    **dict.fromkeys(("stop", "stop_sequences"), 256),
    **dict.fromkeys(("bad_words", "stop_token_ids"), 128),
    **dict.fromkeys(("allowed_token_ids", "logit_bias"), 1024),
}
MOST_NAMES = 4096  # in an object such as metadata; a bad value takes 20 us there
LISTED_TEXTS = ("stop", "stop_sequences", "bad_words")
MOST_TEXT = 16_384  # characters of all texts in one of these lists
# vLLM makes a grammar of these fields, which takes a replica's loop 6 us for each JSON value, and
# 0.6 us for each character of a structural tag that is a text.
GRAMMARS = ("response_format", "structured_outputs", "text", "output_config", "output_format")
MOST_GRAMMAR_VALUES = 16_384  # in these fields and the tools together
MOST_GRAMMAR_BYTES = 131_072  # of one of these fields, as JSON
PROMPT_FIELDS = ("prompt", "prompt_embeds")  # of a completion
# Fields with which a response has the prompt's text.
WITH_PROMPT_TEXT = ("echo", "return_prompt_text", "enable_response_messages")
# Fields that would let a client replace the prompt that was routed, or run on after its request.
REFUSED = ("kv_transfer_params", "ec_transfer_params", "background")
# Arguments of transformers' apply_chat_template, which vLLM also takes from chat_template_kwargs.
# They are no variables of templates. With `padding` and `max_length`, a prompt has any length.
TOKENIZERS = (
    *("conversation", "tokenize", "padding", "truncation", "max_length", "return_tensors"),
    *("return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"),
)

# Fields and parts that bodies of /v1/messages have, and chats do not.
ANTHROPICS = frozenset({"system", "stop_sequences"})
ANTHROPICS_PARTS = frozenset({"tool_use", "tool_result"})

PREFIX = "x-kvroute-prefix"  # header with the name of a declared prefix
PREFIX_NAME = "the name of a declared prefix: a number, or up to 128 characters without ␟"
_PREFIX_ID = TypeAdapter[str](PrefixId)


class Call(Struct, frozen=True):
    """raw: as the client sent it."""

    path: str
    raw: bytes
    body: Mapping[str, Any]
    input_values: int = 0  # JSON values in the items of a list `input`
    caller: Caller | None = None  # None where no keys are needed
    is_stored: bool = False  # its response will be stored
    prefix_name: str = ""  # of the header PREFIX; empty: there is none
    wants_receipts: bool = False  # in the response

    @property
    def model(self) -> str | None:
        model = self.body.get("model")
        return model if isinstance(model, str) else None

    @property
    def cache_salt(self) -> str:
        """Of what the request leaves in caches: its tenant's, with the body's own."""
        return salted(self.caller, self.body.get("cache_salt") or "")

    @property
    def owner(self) -> str:
        """Whose stored responses it finds."""
        return owner(self.caller, self.body.get("cache_salt") or "")

    def as_generating(self) -> "Call | None":
        """Return the generating call whose prompt this call counts; None if it counts none."""
        if self.path == COUNT_TOKENS:
            thinking = self.body.get("thinking")
            budget = thinking.get("budget_tokens") if isinstance(thinking, dict) else None
            most = budget + 1 if type(budget) is int else 1  # vLLM wants more than the budget
            raw = msgspec.json.encode({**self.body, "max_tokens": most})
            return replace(self, path=MESSAGES, raw=raw)
        if self.path == TOKENIZE:
            return replace(self, path=CHATS if "messages" in self.body else COMPLETIONS)
        return None

    def asked_by(self, caller: Caller | None) -> "Call":
        """With its caller. ApiError for names of images, which vLLM would share between tenants:
        who knows a name would see the image, or put another one in its place."""
        if caller is not None and next(_named_parts(self.raw, self.body), None):
            raise unsupported(
                "uuid",
                "an image has a uuid, which is not supported with API keys; leave uuid out",
            )
        return replace(self, caller=caller)

    @property
    def n(self) -> int:
        n = self.body.get("n")
        return n if type(n) is int and n > 0 else 1

    @property
    def reads_cache(self) -> bool:
        """Whether the engine takes what is cached of the prompt. It computes all of a prompt of
        which log-probabilities are wanted."""
        if self.body.get("prompt_logprobs") is not None:
            return False
        echoed = {CHATS: "top_logprobs", COMPLETIONS: "logprobs"}.get(self.path, "")
        return not self.body.get("echo") or self.body.get(echoed) is None

    def prompts(self) -> list[str] | list[TokenIds] | None:
        """A completion's prompts; None if they are not what they should be."""
        prompt = self.body.get("prompt")
        if isinstance(prompt, str | np.ndarray):
            return [prompt]  # type: ignore[return-value]
        return prompt if isinstance(prompt, list) and prompt and _of_one_kind(prompt) else None

    @property
    def prompt_count(self) -> int:
        """How many prompts a completion has, embeds included."""
        embeds, prompts = _listed(self.body.get("prompt_embeds")), _listed(self.body.get("prompt"))
        return len(embeds) + len(prompts)

    def prefix(self) -> tuple[str, str] | None:
        """Return the field or header that names a prefix, and the prefix's name. ApiError."""
        given = {
            name: self.body[name]
            for name in ("task_id", "prefix_id")
            if self.body.get(name) is not None
        }
        if len(given) == 2:
            raise invalid(
                "prefix_id",
                f"prefix_id is {shown(given['prefix_id'])} and task_id is "
                f"{shown(given['task_id'])}; they mean the same thing, keep one of them",
            )
        for field, value in given.items():
            return field, _prefix_id(field, value)
        return (PREFIX, self.prefix_name) if self.prefix_name else None

    @property
    def needs_prompt_text(self) -> bool:
        """Whether the response has the prompt's text: vLLM has it only if it renders the body."""
        return any(self.body.get(name) is True for name in WITH_PROMPT_TEXT)

    def with_prompt(self, number: int) -> bytes:
        """Return the body with only this one of its prompts. vLLM counts prompt_embeds first.

        All other fields keep the bytes that the client sent.
        """
        fields = msgspec.json.decode(self.raw, type=dict[str, msgspec.Raw])
        embeds, prompts = _listed(self.body.get("prompt_embeds")), _listed(self.body.get("prompt"))
        others = {name: raw for name, raw in fields.items() if name not in PROMPT_FIELDS}
        if number < len(embeds):
            return msgspec.json.encode({**others, "prompt_embeds": embeds[number]})
        prompt = prompts[number - len(embeds)]
        alone = prompt.tolist() if isinstance(prompt, np.ndarray) else prompt
        return msgspec.json.encode({**others, "prompt": alone})


def parse_call(path: str, raw: bytes) -> Call:
    """ApiError for a body that is no JSON object, or that no replica should get."""
    raw = raw.removeprefix(BOM)
    body = json_object(raw)
    read_as_vllm_does(body)
    for name in REFUSED:
        if body.get(name):
            raise unsupported(
                name, f"{name} is {shown(body[name])}, which is not supported; leave {name} out"
            )
    _check_template_kwargs(body.get("chat_template_kwargs"))
    check_media_options(body)
    _check_name("cache_salt", body.get("cache_salt"))
    _check_count("n", body.get("n"), MAX_N)
    _check_lengths(path, body)
    prompt = body.get("prompt")
    if path == COMPLETIONS and isinstance(prompt, list):
        body["prompt"] = _compact(prompt)
    _check_values(body)
    _check_grammars(body)
    _check_images(raw, body)
    call = Call(path, raw, body, _input_values(body.get("input")))
    choices = call.n * (max(1, call.prompt_count) if path == COMPLETIONS else 1)
    if choices > MAX_CHOICES:
        raise invalid("prompt", f"these are {choices} choices; ask for at most {MAX_CHOICES}")
    _check_copies(call)
    return call


def parse_any(raw: bytes) -> Call:
    """The same for a body of any generating route."""
    return parse_call(_route_of(json_object(raw)), raw)


def parse_invocation(raw: bytes) -> Call:
    """Return a chat, a completion, or a call of a pooling model, which a replica tells apart."""
    body = json_object(raw.removeprefix(BOM))
    if "messages" in body:
        return parse_call(CHATS, raw)
    is_completion = not body.keys().isdisjoint(PROMPT_FIELDS)
    return parse_call(COMPLETIONS if is_completion else INVOCATIONS, raw)


def _route_of(body: Mapping[str, Any]) -> str:
    """By the fields that only bodies of this route have."""
    if "messages" not in body:
        return RESPONSES if "input" in body else COMPLETIONS
    tools, contents = objects(body.get("tools")), message_parts(body)
    is_message = (
        not ANTHROPICS.isdisjoint(body)
        or any("input_schema" in tool for tool in tools)
        or any(str(part.get("type")) in ANTHROPICS_PARTS for part in contents)
    )
    return MESSAGES if is_message else CHATS


def message_parts(body: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The parts of a body's messages, in order. Content that is no list has none."""
    for field in ("messages", "input"):
        for message in objects(body.get(field)):
            yield from objects(message.get("content"))


def objects(value: object) -> Iterator[Mapping[str, Any]]:
    """Those of a list; none of anything else."""
    if isinstance(value, list):
        yield from (each for each in value if isinstance(each, dict))


def _named_parts(raw: bytes, body: Mapping[str, Any]) -> Iterator[tuple[str, Any, object]]:
    """Of each part of a message that names its image, or the like: the field that has it, the
    field's value, and the name."""
    if b"uuid" not in raw and b"\\u" not in raw:
        return
    for part in message_parts(body):
        if part.get("uuid") is not None:
            yield from ((name, part[name], part["uuid"]) for name in MEDIA if name in part)


def _check_images(raw: bytes, body: Mapping[str, Any]) -> None:
    """A uuid is hashed with each block of its image, and without the image it stands for one that
    only some replica has."""
    for field, value, uuid in _named_parts(raw, body):
        _check_name("uuid", uuid)
        if value is None or value == {"url": None}:
            raise invalid(
                field, f"{field} is null beside the uuid {shown(uuid)}; send the image each time"
            )


def _prefix_id(field: str, value: object) -> str:
    try:
        return _PREFIX_ID.validate_python(value)
    except ValidationError:
        raise invalid(field, f"{field} is {shown(value)}; expected {PREFIX_NAME}") from None


def _check_template_kwargs(given: object) -> None:
    for name in TOKENIZERS:
        if isinstance(given, dict) and name in given:
            raise unsupported(
                "chat_template_kwargs",
                f"chat_template_kwargs has {name}, an argument of the tokenizer; send variables of "
                "the chat template only",
            )


def _check_name(name: str, value: object) -> None:
    if value is not None and not (isinstance(value, str) and len(value) <= MAX_NAME):
        raise invalid(
            name, f"{name} is {shown(value)}; expected a string of up to {MAX_NAME} characters"
        )


def _check_count(name: str, value: object, most: int) -> None:
    if isinstance(value, int) and value > most:
        raise invalid(name, f"{name} is {value}; expected a whole number from 1 to {most}")


def _check_lengths(path: str, body: Mapping[str, Any]) -> None:
    """Of lists and objects in the body's fields."""
    for name, items in body.items():
        if isinstance(items, dict):
            most = MOST_ITEMS.get(name, MOST_NAMES)
        elif isinstance(items, list) and name in MOST_ITEMS and not _is_prompt(path, name, items):
            most = MOST_ITEMS[name]
        else:
            continue
        if len(items) > most:
            raise invalid(name, f"{name} has {len(items)} items; send {most} at most")
    for name in LISTED_TEXTS:
        _check_text(name, body.get(name))


def _check_grammars(body: Mapping[str, Any]) -> None:
    """ApiError for a schema, a grammar or tools of more parts than a replica's loop can take."""
    given = {name: body[name] for name in GRAMMARS if isinstance(body.get(name), dict)}
    values = values_in([*given.values(), body.get("tools")])
    if values > MOST_GRAMMAR_VALUES:
        names = " and ".join([*given, *(["tools"] if body.get("tools") else [])])
        raise invalid(
            names,
            f"{names} has more than {MOST_GRAMMAR_VALUES} JSON values; send a smaller schema, or "
            "fewer tools",
        )
    for name, value in given.items():
        size = len(msgspec.json.encode(value))
        if size > MOST_GRAMMAR_BYTES:
            raise invalid(
                name, f"{name} has {size} bytes; send a schema of {MOST_GRAMMAR_BYTES} at most"
            )


def _check_text(name: str, texts: object) -> None:
    """ApiError for a text, or a list of texts, that is too long."""
    listed = texts if isinstance(texts, list) else [texts]
    size = sum(len(text) for text in listed if isinstance(text, str))
    if size > MOST_TEXT:
        raise invalid(name, f"{name} has {size} characters; send {MOST_TEXT} at most")


def _is_prompt(path: str, name: str, items: Sequence[Any]) -> bool:
    """Whether these are the token ids of one text to embed."""
    return path in PASSED_ON and name == "input" and bool(_token_ids(items))


def _compact(prompt: Sequence[Any]) -> Any:
    """Lists of token ids as arrays, which take a tenth of the memory; anything else unchanged."""
    if ids := _token_ids(prompt):
        return ids[0]
    lists = [each for each in prompt if isinstance(each, list)]
    if len(lists) == len(prompt) <= MAX_CHOICES:
        arrays = [array for each in lists for array in _token_ids(each)]
        if len(arrays) == len(prompt):
            return arrays
    return prompt


def _token_ids(given: Sequence[Any]) -> list[TokenIds]:
    """The ids as one array; none if they are no token ids."""
    if not given or not all(type(each) is int and 0 <= each < 2**32 for each in given):
        return []
    return [np.array(given, np.uint32)]


def _listed(given: Any) -> Sequence[Any]:
    """Return one prompt or several as a list; nothing for null."""
    if given is None:
        return []
    is_one = not isinstance(given, list) or _token_ids(given)
    return [given] if is_one else given


def _of_one_kind(prompts: Sequence[Any]) -> bool:
    kinds = {type(each) for each in prompts}
    return kinds <= {str} or kinds <= {np.ndarray}


def _check_copies(call: Call) -> None:
    """ApiError 413 for many prompts with large fields next to them."""
    prompts = call.prompt_count if call.path == COMPLETIONS else 1
    if prompts < 2 or prompts * len(call.raw) <= MAX_COPIED:
        return
    each = len(msgspec.json.encode({**call.body, "prompt": None, "prompt_embeds": None}))
    if prompts * each > MAX_COPIED:
        raise ApiError(
            413,
            f"the fields next to prompt take {each} bytes, and each of the {prompts} prompts needs "
            f"a copy; the limit is {MAX_COPIED} together. Send fewer prompts at once",
            code="request_too_large",
        )


def values_in(values: Iterable[Any]) -> int:
    """How many JSON values these are, at any depth; beyond MAX_VALUES they are not counted."""
    found = 0
    waiting = [values]
    while waiting and found <= MAX_VALUES:
        for value in waiting.pop():
            found += 1
            if isinstance(value, dict):
                waiting.append(value.values())
            elif isinstance(value, list):
                waiting.append(value)
    return found


def _input_values(given: object) -> int:
    return values_in(given) if isinstance(given, list) else 0


def _check_values(body: Mapping[str, Any]) -> None:
    """ApiError 413 for a body of too many values."""
    if values_in(body.values()) > MAX_VALUES:
        raise ApiError(
            413,
            f"the body has more than {MAX_VALUES} JSON values; send fewer",
            code="request_too_large",
        )
