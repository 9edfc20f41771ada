"""A replica's own Prometheus metrics; vLLM's metrics are in the same registry."""

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

# Label values for the direction of a copy: from host memory to the engine, and back.
DIRECTIONS = ("in", "out")


class ReplicaMetrics:
    """The metrics of one replica, for any engine."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        def counter(name: str, documentation: str, *labels: str) -> Counter:
            return Counter(f"kvroute_engine_{name}", documentation, labels, registry=registry)

        self.registry = registry
        self._readings = Readings(registry)
        self._requests = counter("requests", "Requests that got a first token.")
        self._prompt_tokens = counter(
            "prompt_tokens",
            "Prompt tokens of requests that got a first token, counted once for each request. "
            "vllm:prompt_tokens_total counts them once for each of a request's n choices.",
        )
        self._cached_tokens = counter(
            "cached_tokens",
            "Prompt tokens, of requests that got a first token, that came from the KV cache.",
        )
        self._output_tokens = counter("output_tokens", "Generated tokens.")
        self._stored = counter("stored_blocks", "Blocks that were added to the KV cache.")
        self._evicted = counter(
            "evicted_blocks",
            "Blocks that were evicted from the KV cache and used for other tokens.",
        )
        self._reloaded_tokens = counter(
            "reloaded_tokens", "Prompt tokens that came from the KV cache in host memory."
        )
        copied_bytes = counter(
            "host_bytes",
            "Bytes of KV that were copied from host memory to the engine (in) or back (out).",
            "direction",
        )
        copy_seconds = counter(
            "host_seconds",
            "Seconds of copying KV from host memory to the engine (in) or back (out).",
            "direction",
        )
        self._host_bytes = {name: copied_bytes.labels(name) for name in DIRECTIONS}
        self._host_seconds = {name: copy_seconds.labels(name) for name in DIRECTIONS}
        disk_bytes = counter(
            "disk_bytes",
            "Bytes of KV that were read from the disk cache (in) or written to it (out).",
            "direction",
        )
        self._disk_bytes = {name: disk_bytes.labels(name) for name in DIRECTIONS}
        self._disk_seconds = counter("disk_read_seconds", "Seconds of reading the disk cache.")
        self._disk_failures = counter(
            "disk_failures",
            "Blocks that could not be written to the disk cache or read from it. The engine then "
            "computes them.",
        )
        self._clears = counter("cache_clears", "Number of times that the KV cache was cleared.")
        self._losses = counter(
            "event_losses",
            "Number of times that KV cache events were lost. Each time, the replica's blocks in "
            "the index were corrected.",
        )

    def record_chunk(self, request: GenerateRequest, chunk: Chunk, *, is_first: bool) -> None:
        """Count one chunk from the engine."""
        if is_first:
            self._requests.inc()
            self._prompt_tokens.inc(len(request.token_ids))
            self._cached_tokens.inc(chunk.cached_tokens)
        self._output_tokens.inc(len(chunk.token_ids))

    def record_events(self, events: Iterable[KVEvent], groups: int | None = None) -> None:
        """Count changes of the engine's cache.

        Args:
            events: The changes, in order.
            groups: The number of KV cache groups in the engine's own memory. Events of groups with
                higher numbers are about slower tiers.
        """
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
        self._disk_bytes["in"].inc(transfers.disk_in_bytes)
        self._disk_bytes["out"].inc(transfers.disk_out_bytes)
        self._disk_seconds.inc(transfers.disk_in_s)
        self._disk_failures.inc(transfers.disk_failures)

    def export(
        self, engines: Sequence[Engine], publishers: Sequence[Publisher], ghosts: Sequence[Ghosts]
    ) -> None:
        """Export the numbers of engines, publishers and ghost lists (ghosts.py).

        Each argument has one item for each rank.
        """
        facts = [engine.facts for engine in engines]
        gauge, counter = self._readings.gauge, self._readings.counter
        gauge(
            "kvroute_engine_running_requests",
            "Requests in the engine's batch.",
            lambda: sum(engine.load().running for engine in engines),
        )
        gauge(
            "kvroute_engine_waiting_requests",
            "Requests that wait in the engine for a place in the batch.",
            lambda: sum(engine.load().waiting for engine in engines),
        )
        gauge(
            "kvroute_engine_used_blocks",
            "KV blocks that running requests and pins hold.",
            lambda: sum(engine.load().used_blocks for engine in engines),
        )
        counter(
            "kvroute_engine_rendering_differences",
            "Prompts for which a router's tokens differed from vLLM's. One prompt in 100 is "
            "checked.",
            lambda: sum(engine.load().rendering_differences for engine in engines),
        )
        gauge(
            "kvroute_engine_capacity_blocks",
            "Total number of KV blocks in the engine's memory.",
            lambda: sum(rank.capacity_blocks for rank in facts),
        )
        gauge(
            "kvroute_engine_host_blocks",
            "KV blocks that are cached in host memory.",
            lambda: sum(publisher.host_blocks for publisher in publishers),
        )
        gauge(
            "kvroute_engine_pinned_blocks",
            "KV blocks that pins hold; a block that two of them share counts twice.",
            lambda: sum(sum(engine.pins.values()) for engine in engines),
        )
        gauge(
            "kvroute_engine_pin_capacity_blocks",
            "KV blocks that pins may hold.",
            lambda: sum(rank.pin_blocks for rank in facts),
        )
        gauge("kvroute_engine_block_tokens", "Tokens in one KV block.", lambda: facts[0].block_size)
        self._readings.labelled_counter(
            "cache",
            "kvroute_engine_ghost_hit_tokens",
            "Additional prompt tokens that a cache of 1.25, 1.5 or 2 times the size would have "
            "had; an estimate from blocks that were stored again soon after their eviction.",
            lambda: ghost_hit_tokens(ghosts),
        )
        gauge(
            "kvroute_publisher_blocks",
            "Blocks of the replica that the index should list; blocks with equal content count "
            "once.",
            lambda: sum(publisher.blocks for publisher in publishers),
        )
        gauge(
            "kvroute_publisher_lag_seconds",
            "Age of the oldest change of the cache that is not in the index; 0 if there is none.",
            lambda: max(publisher.lag_s for publisher in publishers),
        )
        gauge(
            "kvroute_publisher_lease_age_seconds",
            "Seconds since the last write that the index accepted. If this is more than the lease, "
            "the replica is no longer in the index.",
            lambda: max(publisher.lease_age_s for publisher in publishers),
        )
        counter(
            "kvroute_publisher_registrations",
            "Number of times that the replica has registered with the index: 1 for its start, and "
            "1 for each loss of its state in Redis.",
            lambda: max(publisher.registrations for publisher in publishers),
        )


def ghost_hit_tokens(ghosts: Sequence[Ghosts]) -> dict[str, float]:
    """Return the sum of the hit tokens of all ranks' ghost lists, for each size of the cache."""
    hits = [ghost_list.hit_tokens for ghost_list in ghosts]
    return {size: sum(tokens[size] for tokens in hits) for size in SIZES}
