"""The records that replicas and routers publish about themselves, as typed values.

A new field needs a default and leaves VERSION unchanged: older readers skip unknown fields.
VERSION rises when an older reader would misunderstand a record. The default of a field never
changes: some records omit defaults, and each reader fills in its own.
"""

import functools
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Struct, field

from kvroute.blocks.cache_groups import Layout
from kvroute.blocks.tiers import DISK, GPU, HOST, Tier
from kvroute.blocks.variants import SETUP_S
from kvroute.contract.identity import Identity
from kvroute.contract.unreadable import UnreadableError

VERSION = 1

MAX_UNFIT = 1000  # characters that a record has for the reasons why vLLM does not fit
MAX_COUNT = 2**48  # highest count that a record may have
Count = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
AtLeastOne = Annotated[int, Meta(ge=1, le=MAX_COUNT)]
Seconds = Annotated[float, Meta(ge=0, le=1e9)]
Rate = Annotated[float, Meta(gt=0, le=1e15)]
Name = Annotated[str, Meta(max_length=1024)]


class Load(Struct, frozen=True, gc=False, omit_defaults=True):
    """An engine's current load."""

    running: Count = 0  # requests in the batch
    waiting: Count = 0  # requests queued in the engine
    used_blocks: Count = 0  # KV blocks that running requests and pins hold
    # Variants of the model in memory, the next one to be evicted first.
    variants: tuple[Name, ...] = field(default=(), name="loras")
    # Recent mean seconds to load a variant. The engine computes nothing meanwhile.
    setup_s: Seconds = field(default=SETUP_S, name="lora_load_s")
    rendering_differences: Count = 0  # prompts that a router and vLLM have rendered differently
    # Measured speed of copies from host memory; 0: unknown.
    host_bytes_per_s: Annotated[float, Meta(ge=0, le=1e15)] = 0.0
    # Measured speed of reads of the disk cache; 0: unknown.
    disk_bytes_per_s: Annotated[float, Meta(ge=0, le=1e15)] = 0.0
    pinned_blocks: Count = 0  # KV blocks that pins hold; a block in two pins counts twice
    features: dict[str, bytes] = {}  # name of a feature -> what its side in the replica reports

    def bytes_per_s(self, tier: Tier) -> float:
        """Return the measured speed of copies from a slower tier; 0: unknown."""
        return {HOST: self.host_bytes_per_s, DISK: self.disk_bytes_per_s}.get(tier, 0.0)


class TierFacts(Struct, frozen=True):
    """A slower tier of one engine, which keeps blocks that were evicted from GPU memory."""

    blocks: Count  # capacity, in blocks of the engine's block_size tokens
    block_bytes: AtLeastOne  # bytes of one such block
    bytes_per_s: Rate  # estimated speed of copies to the engine; Load has the measured speed
    pin_blocks: Count = 0  # blocks that pins may take

    def reload_s(self, blocks: int) -> float:
        """Return the estimated seconds to copy `blocks` blocks back to the engine."""
        return blocks * self.block_bytes / self.bytes_per_s


class EngineFacts(Struct, frozen=True, omit_defaults=True):
    """Properties of an engine that do not change while its replica is registered."""

    block_size: AtLeastOne  # tokens of one fingerprint
    capacity_blocks: Count  # size of the KV cache, in blocks of block_size tokens
    max_model_len: AtLeastOne  # tokens, prompt and output together
    # Estimated prefill speed at a prompt's start, where attention costs little. Routers correct it
    # by measured times to first token.
    prefill_tokens_per_s: Rate
    attention_tokens: Rate = 32_768.0  # context length at which a token's prefill costs double
    prefix_caching: bool = True  # whether the engine reuses cached prefixes
    pin_blocks: Count = 0  # blocks of the KV cache that pins may take, without host memory
    max_num_seqs: Count = 0  # maximum number of requests in one batch; 0: unknown
    step_tokens: AtLeastOne = 8192  # maximum tokens in a step: vLLM's max_num_batched_tokens
    # Maximum number of variants of the model in memory.
    max_variants: Count = field(default=0, name="max_cpu_loras")
    # "vllm", "simulated", "unpatched" (vLLM without kvroute's changes) or "attached" (a server that
    # the user runs).
    engine: Name = "vllm"
    # Form in which the chat template expects a message's content: "string" or "openai" (a list of
    # parts); empty: there is no template.
    content_format: Name = ""
    tool_parser: Name = ""  # vLLM's parser of tool calls; empty: none
    reasoning_parser: Name = ""  # vLLM's parser of reasoning; empty: none
    layout: Layout | None = None  # None: full attention, with blocks of block_size tokens
    host: TierFacts | None = None  # the host memory tier; None: no copies of blocks in host memory
    disk: TierFacts | None = None  # the disk cache; None: there is none
    server: Name = ""  # address of the attached server; empty: the engine is kvroute's own
    # Whether the cached blocks are a guess, because the attached server publishes no events.
    guesses_cache: bool = False
    # Which features are off because kvroute's changes do not fit the installed vLLM, and why.
    unfit: Annotated[str, Meta(max_length=MAX_UNFIT)] = ""

    @property
    def tiers(self) -> Mapping[Tier, TierFacts]:
        """Return the slower tiers of the engine, the fastest first."""
        facts = {HOST: self.host, DISK: self.disk}
        return {tier: each for tier, each in facts.items() if each}

    def pin_blocks_in(self, tier: Tier) -> int:
        """Return the blocks of a tier that pins may take."""
        if tier == GPU:
            return self.pin_blocks
        facts = self.tiers.get(tier)
        return facts.pin_blocks if facts else 0


class ProcessLocation(Struct, frozen=True):
    """The node and process id of a process."""

    node: Name = ""  # address of the node
    pid: Count = 0
    metrics: Name | None = None  # address of its metrics; None: it serves no metrics


class Description(Struct, frozen=True):
    """Properties of a replica that do not change until it registers again."""

    facts: EngineFacts
    identity: Identity | None = None  # None: unknown, and assumed to be equal to the router's
    whereabouts: ProcessLocation = ProcessLocation()
    model: Name = ""  # name of the model, as clients send it
    version: int = VERSION


class RouterDescription(Struct, frozen=True):
    """Properties of a router, which it publishes in the index."""

    whereabouts: ProcessLocation
    version: int = VERSION


class ReplicaRecord(Struct, frozen=True):
    """A replica's entry in the index."""

    id: str
    incarnation: str  # new at every registration
    seq: int  # number of changes since the registration
    facts: EngineFacts
    load: Load
    identity: Identity | None = None
    whereabouts: ProcessLocation = ProcessLocation()


class Versioned(Struct):
    """The field that every versioned record has."""

    version: int


encode = msgspec.json.Encoder().encode


decode_load = msgspec.json.Decoder(Load).decode
_descriptions = msgspec.json.Decoder(Description)
_router_descriptions = msgspec.json.Decoder(RouterDescription)
_versions = msgspec.json.Decoder(Versioned)

T = TypeVar("T", Description, RouterDescription)


@functools.lru_cache(maxsize=4096)
def decode_description(packed: bytes) -> Description:
    """Decode a replica's description. Raises one of DECODE_ERRORS.

    Results are cached, since every poll reads the same descriptions again.
    """
    return _decode(_descriptions, packed)


def decode_router(packed: bytes) -> RouterDescription:
    """Decode a router's description. Raises one of DECODE_ERRORS."""
    return _decode(_router_descriptions, packed)


def _decode(decoder: "msgspec.json.Decoder[T]", packed: bytes) -> T:
    check_version(_versions, packed)
    return decoder.decode(packed)


def check_version(decoder: Any, packed: bytes) -> None:
    """Raise UnreadableError for another version, or a DECODE_ERROR if the version is missing."""
    version = decoder.decode(packed).version
    if version != VERSION:
        raise UnreadableError(f"its version is {version}; this process reads version {VERSION}")
