"""The replicas with a record in the index: their records and leases, and whose cache is usable."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from statistics import median

from msgspec.structs import replace

from kvroute.blocks.cache_groups import UNKNOWN_LAYOUT
from kvroute.blocks.tiers import Tier
from kvroute.blocks.variants import SETUP_S, is_key
from kvroute.contract.ranks import replica_of
from kvroute.contract.records import ReplicaRecord, TierFacts
from kvroute.prefill.speed import PrefillModel, prefill_model
from kvroute.router.index.boundaries import Boundaries, UnknownLayoutError, boundaries_of
from kvroute.router.index.handshake import NO_REASONS, Handshake

# Assumptions for a replica without a record.
UNKNOWN_SPEED = PrefillModel(tokens_per_s=10_000.0, attention_tokens=32_768.0)
UNKNOWN_STEP_TOKENS = 8192  # the most tokens that an engine step computes


class ReplicaRegistry:
    """The latest record of each replica, and values that are derived from the records.

    A replica with several data parallel ranks has one record for each rank. Placement treats each
    rank as a replica: where a replica id is needed, it is the id of the rank.

    Args:
        handshake: finds degraded replicas, for example those with other model files than this
            router.
        running: returns the ids of the replicas that Ray Serve runs. Other replicas in the index
            may belong to another cluster. None: Ray Serve is not available.
    """

    def __init__(
        self, handshake: Handshake, running: Callable[[], Collection[str]] | None = None
    ) -> None:
        self.handshake = handshake
        # Replica id -> where hits can end in its cache. Only engines with several cache groups
        # (index/boundaries.py) have an entry.
        self.layouts: dict[str, Boundaries] = {}
        # Replica id -> its slower tiers, such as host memory. Replicas without any have no entry.
        self.tiers: dict[str, Mapping[Tier, TierFacts]] = {}
        self.free_blocks: dict[str, int] = {}  # replica id -> KV blocks that no request holds
        self._running = running
        self._records: dict[str, ReplicaRecord] = {}
        self._latest: list[ReplicaRecord] = []  # the last records read, when there were any
        # Median of the measured seconds to load a variant; SETUP_S until one is measured.
        self._setup_s = SETUP_S
        self._ranks: dict[str, list[ReplicaRecord]] = {}  # id in Ray Serve -> records of its ranks
        self._leased: set[str] = set()  # ids of ranks with a valid lease

    def __len__(self) -> int:
        return len(self._records)

    def __contains__(self, replica_id: str) -> bool:
        return replica_id in self._records

    def update(
        self,
        records: Iterable[ReplicaRecord],
        *,
        unleased: Iterable[str] = (),
        unreadable: Mapping[str, str] = NO_REASONS,
    ) -> None:
        """Replace all records.

        Args:
            unleased: ids of replicas without a valid lease or without a readable record.
            unreadable: replica id -> why its record cannot be read.
        """
        self._records = {record.id: record for record in records}
        current = self._records.values()
        self._latest = [*current] or self._latest
        self._ranks = _by_replica(current)
        if unreadable and self._running:
            own = set(self._running())
            unreadable = {id_: why for id_, why in unreadable.items() if replica_of(id_) in own}
        self.layouts, unknown_layouts = _layouts(current)
        self.tiers = _tiers(current)
        self.handshake.check(current, unreadable, unknown_layouts)
        self._leased = self._records.keys() - set(unleased)
        setups_s = [record.load.setup_s for record in current]
        measured_s = [setup_s for setup_s in setups_s if setup_s != SETUP_S]
        self._setup_s = median(measured_s) if measured_s else SETUP_S
        self.free_blocks = {
            record.id: record.facts.capacity_blocks - record.load.used_blocks for record in current
        }

    @property
    def records(self) -> list[ReplicaRecord]:
        """Return the records of all replicas."""
        return list(self._records.values())

    @property
    def own_records(self) -> list[ReplicaRecord]:
        """Return the records of the replicas that Ray Serve runs; all if that is not known."""
        running = self._running() if self._running else ()
        if not running:
            return self.records
        return [record for id_ in running for record in self._ranks.get(id_, ())]

    def is_own(self, rank_id: str) -> bool:
        """Return whether Ray Serve runs the rank's replica; true if that is not known.

        Other replicas in the index are starting or leaving, or belong to another deployment with
        the same cluster id.
        """
        running = self._running() if self._running else ()
        return not running or replica_of(rank_id) in running

    @property
    def degraded(self) -> Mapping[str, str]:
        """Return the replicas whose caches are ignored: replica id -> reason."""
        return self.handshake.degraded

    @property
    def max_model_len(self) -> int | None:
        """Return the most tokens, of prompt and response together, that every replica can process.

        None: no replica has had a record.
        """
        return min((record.facts.max_model_len for record in self._describing), default=None)

    @property
    def content_format(self) -> str | None:
        """Return vLLM's content format of the replicas' chat templates.

        Empty: they differ, or there is no template. None: no replica has had a record.
        """
        formats = {record.facts.content_format for record in self._describing}
        if not formats:
            return None
        return formats.pop() if len(formats) == 1 else ""

    @property
    def _describing(self) -> list[ReplicaRecord]:
        """Return the records that describe the running replicas: their own, or else the latest.

        When all replicas were replaced, for example because their machine was drained, the new ones
        run for a moment before their records are read.
        """
        return self.own_records or self._latest

    def get(self, replica_id: str) -> ReplicaRecord | None:
        """Return the replica's record; None: it has none."""
        return self._records.get(replica_id)

    def ranks_of(self, replica_id: str) -> tuple[str, ...]:
        """Return the ids of the ranks that have a record, for a replica's id in Ray Serve."""
        return tuple(record.id for record in self._ranks.get(replica_id, ()))

    def has_lease(self, replica_id: str) -> bool:
        """Return whether the replica's lease was valid when Redis was last read."""
        return replica_id in self._leased

    def is_cache_usable(self, replica_id: str) -> bool:
        """Return whether prompts can have cache hits on the replica."""
        record = self._records.get(replica_id)
        if record is None or replica_id in self.degraded:
            return False
        return record.facts.prefix_caching

    def cache_blocks(self, replica_id: str) -> int:
        """Return the size of the prefix cache in blocks.

        It is 0 if the replica has no prefix cache, is degraded or is unknown.
        """
        if not self.is_cache_usable(replica_id):
            return 0
        return self._records[replica_id].facts.capacity_blocks

    def kv_tokens(self, replica_id: str) -> int:
        """Return the size of the KV cache in tokens; 0 if the replica is unknown."""
        record = self._records.get(replica_id)
        return record.facts.capacity_blocks * record.facts.block_size if record else 0

    def step_tokens(self, replica_id: str) -> int:
        """Return the most tokens that one step of the engine computes."""
        record = self._records.get(replica_id)
        return record.facts.step_tokens if record else UNKNOWN_STEP_TOKENS

    def speed(self, replica_id: str) -> PrefillModel:
        """Return the prefill speed that the replica reports."""
        record = self._records.get(replica_id)
        if record is None:
            return UNKNOWN_SPEED
        return prefill_model(record.facts.prefill_tokens_per_s, record.facts.attention_tokens)

    def usable(self, variant: str, replica_ids: Sequence[str]) -> Sequence[str]:
        """Return the replicas that list this variant of the model, or whose lists are unknown.

        For an added variant, return all of them, since replicas list only the variants that they
        have from the start.
        """
        return [id_ for id_ in replica_ids if is_key(variant) or self._lists(id_, variant)]

    def _lists(self, replica_id: str, variant: str) -> bool:
        record = self._records.get(replica_id)
        identity = record.identity if record else None
        return identity is None or variant in identity.variants

    def setup_s(self, replica_id: str) -> float:
        """Return the seconds that the replica takes to load a variant.

        A replica that has loaded none yet is assumed to be as fast as the others. Otherwise, new
        variants would go to the first replica that has measured its time.
        """
        record = self._records.get(replica_id)
        own_s = record.load.setup_s if record else SETUP_S
        return own_s if own_s != SETUP_S else self._setup_s

    def tiers_as_json(self, replica_id: str) -> dict[str, dict[str, float]]:
        """Return the size and copy speed of each of the replica's slower tiers, by tier name."""
        return {
            tier.name: {"blocks": facts.blocks, "gb_per_s": round(facts.bytes_per_s / 1e9, 3)}
            for tier, facts in self.tiers.get(replica_id, {}).items()
        }


def own_degraded(replicas: ReplicaRegistry) -> dict[str, str]:
    """Return the entries of `degraded` for the replicas that Ray Serve runs."""
    return {id_: reason for id_, reason in replicas.degraded.items() if replicas.is_own(id_)}


def _by_replica(records: Iterable[ReplicaRecord]) -> dict[str, list[ReplicaRecord]]:
    """Return the records of ranks, by the id of their replica."""
    ranks: dict[str, list[ReplicaRecord]] = {}
    for record in records:
        ranks.setdefault(replica_of(record.id), []).append(record)
    return ranks


def _layouts(records: Iterable[ReplicaRecord]) -> tuple[dict[str, Boundaries], dict[str, str]]:
    """Return where hits can end in engines with several cache groups, by replica id.

    The second result says, also by replica id, why an engine's cache layout is not supported.
    """
    layouts, unknown = dict[str, Boundaries](), dict[str, str]()
    for record in records:
        facts = record.facts
        if facts.layout is None or not facts.prefix_caching:
            continue
        try:
            layouts[record.id] = boundaries_of(facts.layout, facts.block_size)
        except UnknownLayoutError as error:
            unknown[record.id] = f"{UNKNOWN_LAYOUT}{error}"
    return layouts, unknown


def _tiers(records: Iterable[ReplicaRecord]) -> dict[str, Mapping[Tier, TierFacts]]:
    """Return the slower tiers by replica id; a measured copy speed replaces the estimated one."""
    return {
        record.id: {
            tier: replace(facts, bytes_per_s=record.load.bytes_per_s(tier) or facts.bytes_per_s)
            for tier, facts in record.facts.tiers.items()
        }
        for record in records
        if record.facts.tiers and record.facts.prefix_caching
    }
