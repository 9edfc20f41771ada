"""Converts the body of a request to the simulated engine's sampling parameters, or rejects it."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta, Raw, Struct, ValidationError

COMPLETION_TOKENS = 16  # max_tokens of a completion that sets none, as in OpenAI's API
GREEDY_BELOW = 1e-5  # temperatures below this are greedy; vLLM then rejects n > 1
MAX_STOP_CHARACTERS = 4096  # maximum number of characters of all stop strings together
MAX_SHOWN = 80  # maximum number of characters of a wrong value that an error shows

# Fields that the simulated engine does not support -> the values that have no effect. It accepts a
# field only with one of these values, or null. It also accepts tools, but never calls any.
UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "add_generation_prompt": (True,),
    "allowed_token_ids": ([],),
    "audio": (),
    "bad_words": ([],),
    "chat_template": (),
    "continue_final_message": (False,),
    "documents": ([],),
    "echo": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "logprob_token_ids": ([],),
    "logits_processors": ([],),
    "min_p": (0,),
    "modalities": ([], ["text"]),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "skip_special_tokens": (True,),
    "stop_token_ids": ([],),
    "structured_outputs": ({},),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "web_search_options": (),
}

Tokens = Annotated[int, Meta(ge=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
TopLogprobs = Annotated[int, Meta(ge=0, le=20)]
StopText = Annotated[str, Meta(min_length=1)]


@dataclass(frozen=True, slots=True)
class Sampling:
    """The sampling parameters of one request."""

    max_tokens: int = 1
    min_tokens: int = 0
    temperature: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    n: int = 1  # number of choices, which are generated from one shared prompt
    logprobs: int | None = None  # number of likely tokens to list at each position; None: no list
    is_stream: bool = False
    include_usage: bool = False  # whether a stream ends with an event that contains token counts

    @property
    def can_continue(self) -> bool:
        """Return whether another engine can continue the response after a failure.

        This needs a single choice, because the tokens generated so far are appended to the prompt.
        """
        return self.n == 1


class UnsupportedRequestError(Exception):
    """The simulated engine does not support the request, or the request is wrong."""

    def __init__(
        self, message: str, param: str | None = None, code: str = "invalid_value", status: int = 400
    ) -> None:
        super().__init__(message)
        self.status = status
        self.body = msgspec.json.encode(
            {
                "error": {
                    "message": message,
                    "type": "invalid_request_error",
                    "param": param,
                    "code": code,
                }
            }
        )


class _StreamOptions(Struct):
    include_usage: bool | None = None


class CommonBody(Struct):
    """The fields that chats and completions have in common."""

    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    max_tokens: Tokens | None = None
    min_tokens: Annotated[int, Meta(ge=0)] | None = None
    stop: StopText | Annotated[list[StopText], Meta(max_length=64)] | None = None
    seed: int | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None

    def max_answer_tokens(self, context_tokens: int) -> int:
        """Return the maximum length of the answer, in tokens.

        Args:
            context_tokens: The number of tokens that the model's context has left for the answer.
        """
        return self.max_tokens or min(COMPLETION_TOKENS, context_tokens)

    def alternatives(self) -> int | None:
        """Return how many likely tokens the response lists per position.

        None: no logprobs are requested.
        """
        return None


class Completion(CommonBody):
    logprobs: TopLogprobs | None = None
    best_of: Tokens | None = None

    def alternatives(self) -> int | None:
        if self.best_of not in (None, self.n or 1):
            raise _unsupported("best_of", f"{self.best_of}")
        return self.logprobs


class Chat(CommonBody):
    max_completion_tokens: Tokens | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None

    def max_answer_tokens(self, context_tokens: int) -> int:
        return self.max_completion_tokens or self.max_tokens or context_tokens

    def alternatives(self) -> int | None:
        if self.top_logprobs and not self.logprobs:
            raise UnsupportedRequestError(
                f"top_logprobs is {self.top_logprobs} without logprobs; set logprobs to true",
                "top_logprobs",
            )
        return (self.top_logprobs or 0) if self.logprobs else None


def read(kind: type[CommonBody], raw: bytes, *, prompt_tokens: int, max_model_len: int) -> Sampling:
    """Return the sampling parameters in a request's body.

    Args:
        kind: The type of the body.
        raw: The body as JSON.
        prompt_tokens: The number of tokens of the prompt.
        max_model_len: The maximum number of tokens of prompt and answer.

    Raises:
        UnsupportedRequestError: The body is wrong, or the engine does not support it.
    """
    body = _checked(kind, raw)
    requested = body.max_answer_tokens(0)
    context_tokens = max_model_len - prompt_tokens  # tokens that are left for the answer
    if context_tokens < max(1, requested):
        raise UnsupportedRequestError(
            f"This model's maximum context length is {max_model_len} tokens. However, you sent "
            f"{prompt_tokens} tokens, and requested {requested} more. Please send or request less.",
            "messages" if kind is Chat else "prompt",
            "context_length_exceeded",
        )
    sampling = Sampling(
        max_tokens=body.max_answer_tokens(context_tokens),
        min_tokens=body.min_tokens or 0,
        temperature=1.0 if body.temperature is None else body.temperature,
        seed=body.seed,
        stop=(body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ()),
        n=body.n or 1,
        logprobs=body.alternatives(),
        is_stream=bool(body.stream),
        include_usage=bool(body.stream_options and body.stream_options.include_usage),
    )
    _check(sampling)
    return sampling


def check(kind: type[CommonBody], raw: bytes) -> None:
    """Raise UnsupportedRequestError if the body would be rejected with any prompt."""
    _checked(kind, raw).alternatives()


def _checked(kind: type[CommonBody], raw: bytes) -> CommonBody:
    try:
        fields = msgspec.json.decode(raw, type=dict[str, Raw])
    except msgspec.MsgspecError as error:
        raise UnsupportedRequestError(
            f"the body is not valid JSON: {error}", code="invalid_json"
        ) from None
    for name, accepted in UNSUPPORTED.items():
        value = msgspec.json.decode(fields[name]) if name in fields else None
        if value is not None and value not in accepted:
            raise _unsupported(name, _shown(fields[name]))
    try:
        return msgspec.json.decode(raw, type=kind)
    except ValidationError as error:
        raise _invalid(str(error), fields) from None


def _check(sampling: Sampling) -> None:
    """Raise UnsupportedRequestError if fields contradict each other."""
    if sampling.n > 1 and sampling.temperature < GREEDY_BELOW:
        raise UnsupportedRequestError(
            f"n is {sampling.n} and temperature is {sampling.temperature:g}, so every choice would "
            "be the same; set n to 1, or a higher temperature",
            "n",
        )
    if sampling.min_tokens > sampling.max_tokens:
        raise UnsupportedRequestError(
            f"min_tokens is {sampling.min_tokens}, above the limit of {sampling.max_tokens} tokens "
            "on the answer; lower it, or raise max_tokens",
            "min_tokens",
        )
    if sum(map(len, sampling.stop)) > MAX_STOP_CHARACTERS:
        raise UnsupportedRequestError(
            f"stop is too long; use at most {MAX_STOP_CHARACTERS} characters in all strings", "stop"
        )


def _invalid(problem: str, fields: Mapping[str, Raw]) -> UnsupportedRequestError:
    """Return msgspec's error with the field's name and value."""
    reason, _, path = problem.partition(" - at `$")
    param = path.strip("`.")
    name = re.split(r"[.\[]", param)[0]
    if name not in fields:
        return UnsupportedRequestError(problem)
    return UnsupportedRequestError(
        f"{name} is {_shown(fields[name])}; {reason[:1].lower() + reason[1:]}", param or None
    )


def _unsupported(name: str, shown: str) -> UnsupportedRequestError:
    return UnsupportedRequestError(
        f"{name} is {shown}, which the simulated engine does not support; leave {name} out",
        name,
        "unsupported_parameter",
    )


def _shown(value: Raw) -> str:
    text = bytes(value)[: 4 * MAX_SHOWN].decode(errors="replace")
    return text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "…"
