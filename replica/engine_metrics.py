"""A replica's own Prometheus metrics; vLLM's are in the same registry."""

from collections.abc import Iterable, Sequence

from prometheus_client import REGISTRY, CollectorRegistry, Counter

from kvroute.contract.generation import Chunk, GenerateRequest
from kvroute.process.exposition import Readings
from kvroute.replica.engine.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventsLost,
    KVEvent,
    Transfers,
)
from kvroute.replica.engine.protocol import Engine
from kvroute.replica.ghosts import SIZES, Ghosts
from kvroute.replica.publisher import Publisher

WAYS = ("in", "out")


class ReplicaMetrics:
    """The metrics of one replica, for any engine."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        def counter(name: str, documentation: str, *labels: str) -> Counter:
            return Counter(f"kvroute_engine_{name}", documentation, labels, registry=registry)

        self._readings = Readings(registry)
        self._requests = counter("requests", "Requests that got a first token.")
        self._prompt_tokens = counter(
            "prompt_tokens",
            "Prompt tokens of those requests, once for each request. vllm:prompt_tokens_total has "
            "them once for each of its n choices.",
        )
        self._cached_tokens = counter(
            "cached_tokens", "Those prompt tokens that came from the KV cache."
        )
        self._output_tokens = counter("output_tokens", "Tokens of answers.")
        self._stored = counter("stored_blocks", "Blocks that the KV cache took in.")
        self._evicted = counter("evicted_blocks", "Blocks that it reused for other tokens.")
        self._reloaded_tokens = counter(
            "reloaded_tokens", "Prompt tokens that came from the KV cache in host memory."
        )
        moved = counter(
            "host_bytes",
            "KV copied from host memory to the engine (in) or back (out).",
            "direction",
        )
        moving = counter("host_seconds", "Time that those copies took.", "direction")
        self._host_bytes = {way: moved.labels(way) for way in WAYS}
        self._host_seconds = {way: moving.labels(way) for way in WAYS}
        self._clears = counter("cache_clears", "Times that it was emptied.")
        self._losses = counter(
            "event_losses", "Times that its events were lost, and the index began anew."
        )

    def received(self, request: GenerateRequest, chunk: Chunk, *, is_first: bool) -> None:
        """Counts one chunk from the engine."""
        if is_first:
            self._requests.inc()
            self._prompt_tokens.inc(len(request.token_ids))
            self._cached_tokens.inc(chunk.cached_tokens)
        self._output_tokens.inc(len(chunk.token_ids))

    def happened(self, events: Iterable[KVEvent], groups: int | None = None) -> None:
        """Counts changes of the engine's cache. groups: how many the engine's own memory has; what
        events tell of further ones is about host memory."""
        for event in events:
            match event:
                case BlockStored() if groups is None or event.group < groups:
                    self._stored.inc(len(event.block_hashes))
                case BlockRemoved() if groups is None or event.group < groups:
                    self._evicted.inc(len(event.block_hashes))
                case Transfers():
                    self._count_transfers(event)
                case AllBlocksCleared():
                    self._clears.inc()
                case EventsLost():
                    self._losses.inc()
                case _:
                    pass

    def _count_transfers(self, transfers: Transfers) -> None:
        self._reloaded_tokens.inc(transfers.reloaded_tokens)
        self._host_bytes["in"].inc(transfers.in_bytes)
        self._host_bytes["out"].inc(transfers.out_bytes)
        self._host_seconds["in"].inc(transfers.in_s)
        self._host_seconds["out"].inc(transfers.out_s)

    def export(
        self, engines: Sequence[Engine], publishers: Sequence[Publisher], ghosts: Sequence[Ghosts]
    ) -> None:
        """Adds the numbers of engines, publishers and ghost lists, one of each for every rank."""
        facts = [engine.facts for engine in engines]
        gauge, counter = self._readings.gauge, self._readings.counter
        gauge(
            "kvroute_engine_running_requests",
            "Requests in the engine's batch.",
            lambda: sum(engine.load().running for engine in engines),
        )
        gauge(
            "kvroute_engine_waiting_requests",
            "Requests that wait in the engine for room in the batch.",
            lambda: sum(engine.load().waiting for engine in engines),
        )
        gauge(
            "kvroute_engine_used_blocks",
            "KV blocks that running requests and pins hold.",
            lambda: sum(engine.load().used_blocks for engine in engines),
        )
        counter(
            "kvroute_engine_rendering_differences",
            "Prompts that a router has rendered in another way than vLLM; 1 in 100 is checked.",
            lambda: sum(engine.load().rendering_differences for engine in engines),
        )
        gauge(
            "kvroute_engine_capacity_blocks",
            "KV blocks in all.",
            lambda: sum(each.capacity_blocks for each in facts),
        )
        gauge(
            "kvroute_engine_host_blocks",
            "KV blocks in host memory.",
            lambda: sum(publisher.host_blocks for publisher in publishers),
        )
        gauge(
            "kvroute_engine_pinned_blocks",
            "KV blocks that named prefixes hold; what two of them share counts twice.",
            lambda: sum(sum(engine.pins.values()) for engine in engines),
        )
        gauge(
            "kvroute_engine_pin_capacity_blocks",
            "KV blocks that named prefixes may hold.",
            lambda: sum(each.pin_blocks for each in facts),
        )
        gauge("kvroute_engine_block_tokens", "Tokens in one KV block.", lambda: facts[0].block_size)
        self._readings.counter_of(
            "cache",
            "kvroute_engine_ghost_hit_tokens",
            "Prompt tokens that a cache of 1.25, 1.5 or 2 times the size would have found besides; "
            "an estimate from what is stored again soon after it was evicted.",
            lambda: ghost_hit_tokens(ghosts),
        )
        gauge(
            "kvroute_publisher_blocks",
            "Blocks of different content that the index should have of the replica.",
            lambda: sum(publisher.blocks for publisher in publishers),
        )
        gauge(
            "kvroute_publisher_lag_seconds",
            "Age of the oldest change of the cache that the index does not have; 0: it has all.",
            lambda: max(publisher.lag_s for publisher in publishers),
        )
        gauge(
            "kvroute_publisher_lease_age_seconds",
            "Since the index last took anything from the replica; beyond its lease it is gone.",
            lambda: max(publisher.lease_age_s for publisher in publishers),
        )
        counter(
            "kvroute_publisher_registrations",
            "Times that the replica was announced to the index: more than 1 after each trouble.",
            lambda: max(publisher.registrations for publisher in publishers),
        )


def ghost_hit_tokens(ghosts: Sequence[Ghosts]) -> dict[str, float]:
    """Of all ranks, by the size of the cache."""
    each = [every.hit_tokens for every in ghosts]
    return {size: sum(tokens[size] for tokens in each) for size in SIZES}
