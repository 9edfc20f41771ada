"""The schemas of client requests: OpenAI's chats and completions, and prefix declarations."""

from typing import Annotated, Any, Literal, Self

import numpy as np
from pydantic import (
    BaseModel,
    BeforeValidator,
    Field,
    PlainValidator,
    StrictBool,
    TypeAdapter,
    ValidationInfo,
    WrapValidator,
    field_validator,
    model_validator,
)

from kvroute.contract.generation import TokenIds
from kvroute.contract.prefix_id import PrefixId
from kvroute.router.api.errors import ApiError, invalid, shown, unsupported
from kvroute.router.api.sampling import Name, SamplingRequest, Tokens, TopLogprobs, as_one, problem

MAX_CHOICES = 1024  # prompts times n in one request
MAX_MESSAGES = 8192  # of a chat
MAX_PARTS = 1024  # of a message
COMPLETION_TOKENS = 16  # OpenAI's default for completions
PREFIX_NAME = "the name of a declared prefix: a number, or a string of up to 128 characters"

TokenId = Annotated[int, Field(strict=True, ge=0, lt=2**32)]
_TOKEN_LIST = TypeAdapter(Annotated[list[TokenId], Field(min_length=1, fail_fast=True)])


def _token_ids(value: object) -> TokenIds:
    """An array takes a tenth of a list's memory."""
    return np.array(_TOKEN_LIST.validate_python(value), dtype=np.uint32)


TokenList = Annotated[TokenIds, PlainValidator(_token_ids)]
Prompt = Annotated[
    str
    | Annotated[list[str], Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True)]
    | TokenList
    | Annotated[list[TokenList], Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True)],
    WrapValidator(as_one),
]


def _part_text(index: int, part: object) -> str:
    if not isinstance(part, dict):
        raise problem(f'part {index} is not an object such as {{"type": "text", "text": "hi"}}')
    if part.get("type") != "text":
        raise problem(
            f"part {index} has type {shown(part.get('type'))}, and this model reads text only"
        )
    if not isinstance(part.get("text"), str):
        raise problem(f"part {index} needs a string as its text")
    return str(part["text"])


def _plain_text(content: object, info: ValidationInfo) -> str:
    """The text of a message: text parts are joined by newlines, as vLLM does."""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and 0 < len(content) <= MAX_PARTS:
        return "\n".join(_part_text(index, part) for index, part in enumerate(content))
    if content is None and info.data.get("role") == "assistant":
        return ""
    raise problem(
        f"expected a string, or a list of up to {MAX_PARTS} parts such as "
        '{"type": "text", "text": "hi"}'
    )


class ChatMessage(BaseModel):
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, BeforeValidator(_plain_text)]
    tool_calls: object = None
    function_call: object = None

    @field_validator("tool_calls", "function_call")
    @classmethod
    def _no_tools(cls, value: object) -> object:
        if value:
            raise problem("calling tools is not supported; send the text alone")
        return value


def two_prefixes(*, prefix_id: object, task_id: object) -> ApiError:
    return invalid(
        "prefix_id",
        f"prefix_id is {shown(prefix_id)} and task_id is {shown(task_id)}; they mean the same "
        "thing, keep one of them",
    )


class PrefixedRequest(SamplingRequest):
    """A request that may name the prefix that it starts with."""

    task_id: PrefixId | None = Field(None, description=PREFIX_NAME)  # RTP-LLM's name for it
    prefix_id: PrefixId | None = Field(None, description=PREFIX_NAME)

    @model_validator(mode="after")
    def _one_prefix(self) -> Self:
        if self.task_id is not None and self.prefix_id is not None:
            raise two_prefixes(prefix_id=self.prefix_id, task_id=self.task_id)
        return self

    def prefix(self) -> tuple[str, str] | None:
        """The field that names a prefix, and the prefix's name."""
        if self.task_id is not None:
            return "task_id", self.task_id
        if self.prefix_id is not None:
            return "prefix_id", self.prefix_id
        return None


class PrefixDeclaration(BaseModel):
    """A named prefix to keep warm."""

    model: Name | None = Field(None, description="the name of a served model")
    id: PrefixId = Field(description="a number, or a string of up to 128 characters")
    prompt: str | None = Field(None, min_length=1, description="a string that is not empty")
    messages: list[ChatMessage] | None = Field(
        None,
        min_length=1,
        max_length=MAX_MESSAGES,
        fail_fast=True,
        description=f"a list of 1 to {MAX_MESSAGES} messages such as "
        '{"role": "system", "content": "hi"}',
    )
    replicas: Annotated[Literal["all"] | Tokens, WrapValidator(as_one)] = Field(
        "all", description='"all", or a whole number from 1'
    )
    ttl_s: float | None = Field(
        None, strict=True, gt=0, allow_inf_nan=False, description="seconds, more than 0"
    )
    pinned: StrictBool = Field(True, description="true or false")

    @model_validator(mode="after")
    def _one_text(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise invalid(
                "prompt", "expected either a prompt or messages, which other text can follow"
            )
        return self

    def source(self) -> dict[str, Any]:
        """The declared text, in the form that a stored prefix keeps."""
        if self.messages is None:
            return {"prompt": self.prompt}
        pairs = [{"role": each.role, "content": each.content} for each in self.messages]
        return {"messages": pairs}


class ChatCompletionRequest(PrefixedRequest):
    prompt_field = "messages"
    prompt_noun = "messages"

    messages: list[ChatMessage] = Field(
        min_length=1,
        max_length=MAX_MESSAGES,
        fail_fast=True,
        description=f"a list of 1 to {MAX_MESSAGES} messages such as "
        '{"role": "user", "content": "hi"}',
    )
    max_completion_tokens: Tokens | None = Field(None, description="a whole number from 1")
    logprobs: StrictBool = Field(False, description="true or false")
    top_logprobs: TopLogprobs = Field(0, description="a whole number from 0 to 20")

    @model_validator(mode="after")
    def _top_logprobs_need_logprobs(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise invalid(
                "top_logprobs",
                f"top_logprobs is {self.top_logprobs} without logprobs; set logprobs to true",
            )
        return self

    def requested_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    def default_tokens(self, room_tokens: int) -> int:
        return room_tokens

    def reported_logprobs(self) -> int | None:
        return self.top_logprobs if self.logprobs else None


class CompletionRequest(PrefixedRequest):
    prompt_field = "prompt"
    prompt_noun = "prompt"

    prompt: Prompt = Field(
        description="a string, a list of strings, a list of token ids or a list of such lists; "
        f"none is empty, and there are at most {MAX_CHOICES}"
    )
    logprobs: TopLogprobs | None = Field(None, description="a whole number from 0 to 20")
    best_of: int | None = Field(None, strict=True, ge=1, description="a whole number from 1")

    @model_validator(mode="after")
    def _choices_are_bounded(self) -> Self:
        prompts = len(self.prompts())
        if prompts * self.n > MAX_CHOICES:
            raise invalid(
                "prompt",
                f"{prompts} prompts with n {self.n} make {prompts * self.n} choices; "
                f"ask for at most {MAX_CHOICES} in one request",
            )
        if self.best_of is not None and self.best_of != self.n:
            raise unsupported(
                "best_of", f"best_of is {self.best_of} and n is {self.n}; leave best_of out"
            )
        return self

    def prompts(self) -> list[str] | list[TokenIds]:
        """The prompts in order; a single one as a list of one."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt, np.ndarray):
            return [self.prompt]
        return self.prompt

    def default_tokens(self, room_tokens: int) -> int:
        return min(COMPLETION_TOKENS, room_tokens)

    def reported_logprobs(self) -> int | None:
        return self.logprobs
