"""The request fields that chat and completions share become the engine's sampling settings."""

from abc import ABC, abstractmethod
from typing import Annotated, ClassVar, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    Field,
    StrictBool,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)
from pydantic_core import PydanticCustomError, ValidationError

from kvroute.contract.generation import Sampling
from kvroute.router.api.errors import context_length_exceeded, invalid

GREEDY_BELOW = 1e-5  # below this temperature vLLM samples greedily, and then refuses n > 1

# A number is never a string or a boolean; an integer is accepted as a float.
Temperature = Annotated[float, Field(strict=True, ge=0, le=2)]
Share = Annotated[float, Field(strict=True, gt=0, le=1)]
Penalty = Annotated[float, Field(strict=True, ge=-2, le=2)]
Tokens = Annotated[int, Field(strict=True, ge=1)]
TopLogprobs = Annotated[int, Field(strict=True, ge=0, le=20)]
StopText = Annotated[str, Field(min_length=1)]
Name = Annotated[str, Field(max_length=256)]


def problem(message: str) -> PydanticCustomError:
    """The error that a validator raises, with the message unchanged, including braces."""
    return PydanticCustomError("kvroute", "{message}", {"message": message})


def as_one(value: object, validate: ValidatorFunctionWrapHandler) -> object:
    """Makes a union fail as one field, not once for each member."""
    try:
        return validate(value)
    except ValidationError:
        raise PydanticCustomError("union", "expected another type") from None


MAX_STOPS = 64
MAX_STOP_CHARACTERS = 4096  # of all together: each prompt of a call takes a copy to its replica


def _bounded(stop: str | list[str]) -> str | list[str]:
    if sum(map(len, stop)) > MAX_STOP_CHARACTERS:
        raise problem("too many characters")  # an error quotes the field's description
    return stop


Stop = Annotated[
    StopText | Annotated[list[StopText], Field(max_length=MAX_STOPS, fail_fast=True)],
    WrapValidator(as_one),
    AfterValidator(_bounded),
]


class StreamOptions(BaseModel):
    include_usage: StrictBool | None = None


class SamplingRequest(BaseModel, ABC):
    """The fields that chat and completions share. An error quotes the description as expected."""

    prompt_field: ClassVar[str]
    prompt_noun: ClassVar[str]

    model: Name | None = Field(None, description="the name of a served model")
    temperature: Temperature = Field(1.0, description="a number from 0 to 2")
    top_p: Share = Field(1.0, description="a number above 0, up to 1")
    top_k: int = Field(
        0, strict=True, ge=-1, lt=2**31, description="a whole number from 1, or 0 for every token"
    )
    max_tokens: Tokens | None = Field(None, description="a whole number from 1")
    min_tokens: int = Field(0, strict=True, ge=0, description="a whole number from 0")
    stop: Stop = Field(
        [],
        description=f"a string, or a list of up to {MAX_STOPS} strings, none of them empty, and of "
        f"up to {MAX_STOP_CHARACTERS} characters together",
    )
    seed: int | None = Field(
        None, strict=True, ge=-(2**63), lt=2**63, description="a whole number of 64 bits"
    )
    presence_penalty: Penalty = Field(0.0, description="a number from -2 to 2")
    frequency_penalty: Penalty = Field(0.0, description="a number from -2 to 2")
    n: int = Field(1, strict=True, ge=1, le=128, description="a whole number from 1 to 128")
    ignore_eos: StrictBool = Field(False, description="true or false")
    stream: StrictBool = Field(False, description="true or false")
    stream_options: StreamOptions = Field(
        StreamOptions(), description='an object such as {"include_usage": true}'
    )
    cache_salt: Name = Field(
        "",
        description="a string of up to 256 characters: prefixes are shared among requests with the "
        "same one",
    )

    @model_validator(mode="after")
    def _greedy_has_one_choice(self) -> Self:
        if self.n > 1 and self.temperature < GREEDY_BELOW:
            raise invalid(
                "n",
                f"n is {self.n} and temperature is {self.temperature:g}, so every choice would be "
                "the same; set n to 1, or a higher temperature",
            )
        return self

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return self.stream_options.include_usage or False

    def requested_tokens(self) -> int | None:
        """The response's length limit, if the client set one."""
        return self.max_tokens

    @abstractmethod
    def default_tokens(self, room_tokens: int) -> int:
        """The response's length limit if the client set none."""

    @abstractmethod
    def reported_logprobs(self) -> int | None:
        """Alternatives to report for each token; None: no logprobs."""

    def room(self, prompt_tokens: int, max_model_len: int) -> int:
        """Tokens left for the response; ApiError if the prompt or the requested length is too
        long."""
        requested = self.requested_tokens()
        limit = f"This model's maximum context length is {max_model_len} tokens. However, "
        if prompt_tokens >= max_model_len:
            raise context_length_exceeded(
                self.prompt_field,
                f"{limit}your {self.prompt_noun} resulted in {prompt_tokens} tokens, which leaves "
                f"no room for an answer. Please reduce the length of the {self.prompt_noun}.",
            )
        if requested is not None and prompt_tokens + requested > max_model_len:
            raise context_length_exceeded(
                self.prompt_field,
                f"{limit}you requested {prompt_tokens + requested} tokens ({prompt_tokens} in the "
                f"{self.prompt_noun}, {requested} in the completion). Please reduce the length of "
                f"the {self.prompt_noun} or completion.",
            )
        return max_model_len - prompt_tokens

    def sampling(self, room_tokens: int) -> Sampling:
        """The engine's sampling settings; `room_tokens` comes from `room`."""
        max_tokens = self.requested_tokens() or self.default_tokens(room_tokens)
        if self.min_tokens > max_tokens:
            raise invalid(
                "min_tokens",
                f"min_tokens is {self.min_tokens}, above the limit of {max_tokens} tokens on the "
                "answer; lower it, or raise max_tokens",
            )
        return Sampling(
            max_tokens=max_tokens,
            min_tokens=self.min_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=max(self.top_k, 0),
            seed=self.seed,
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop),
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            n=self.n,
            logprobs=self.reported_logprobs(),
            ignore_eos=self.ignore_eos,
        )
