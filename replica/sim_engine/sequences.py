"""The requests in a simulated engine, and the sequences that each request generates."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvroute.contract.generation import GenerateRequest
from kvroute.contract.keep import RetentionHint
from kvroute.features.engine_feature import data_of
from kvroute.replica.modelled.modelled_scheduler import ModelledSequence
from kvroute.replica.sim_engine.blocks import Table
from kvroute.replica.sim_engine.choice_output import ChoiceOutput
from kvroute.replica.sim_engine.config import SimulatedConfig
from kvroute.replica.sim_engine.fake_text import StopText, TokenGenerator
from kvroute.replica.sim_engine.sampling import Sampling


def max_tokens_of(request: GenerateRequest, sampling: Sampling, config: SimulatedConfig) -> int:
    """Return the maximum number of tokens of each choice.

    Raises:
        ValueError: An engine with this configuration can never run the request.
    """
    prompt_tokens, longest = len(request.prompt_ids), config.max_model_len - 1
    if not 1 <= prompt_tokens <= longest:
        raise ValueError(f"the prompt has {prompt_tokens} tokens; send 1 to {longest} tokens")
    max_tokens = min(sampling.max_tokens, config.max_model_len - prompt_tokens)
    if request.answered >= max_tokens:
        raise ValueError(f"the answer has all of its {max_tokens} tokens already")
    # The KV of the last generated token is never computed, so it needs no place in a block.
    blocks = -(-(prompt_tokens + max_tokens - 1) // config.block_size)
    if blocks > config.capacity_blocks:
        raise ValueError(
            f"prompt and answer need {blocks} KV blocks, but the engine has only "
            f"{config.capacity_blocks}; send a shorter prompt or a smaller max_tokens"
        )
    return max_tokens


@dataclass(slots=True, eq=False)
class Job:
    """A request in the engine, with one RunningChoice for each of its `n` choices."""

    request: GenerateRequest
    sampling: Sampling
    max_tokens: int  # maximum number of tokens of each choice
    # Sort key of admission: arrival time plus the request's order_s, then the arrival's number.
    order: tuple[float, int]
    unfinished: int  # number of choices that have not finished
    cached_tokens: int | None = None  # number of cached prompt tokens at the first admission
    outputs: asyncio.Queue[ChoiceOutput | None] = field(
        default_factory=asyncio.Queue
    )  # None: the end


@dataclass(eq=False)
class RunningChoice(ModelledSequence):
    """A sequence that a job generates. It is waiting or in the batch."""

    job: Job
    index: int
    table: Table
    generator: TokenGenerator
    text: StopText
    computed: int = 0
    since: int = 0
    is_in_lane: bool = False
    generated: int = 0  # number of generated tokens
    unsent: list[ChoiceOutput] = field(default_factory=list)  # outputs since the last chunk

    @property
    def order(self) -> tuple[float, int, int]:
        return (*self.job.order, self.index)

    @property
    def is_batch(self) -> bool:
        return self.job.request.is_batch

    @property
    def lora(self) -> str:
        return self.job.request.variant

    @property
    def arrived_s(self) -> float:
        return self.job.order[0] - self.job.request.order_s

    @property
    def data(self) -> Mapping[str, bytes]:
        return data_of(self.job.request)

    @property
    def hint(self) -> RetentionHint:
        return self.job.request.keep or RetentionHint()
