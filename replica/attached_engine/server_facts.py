"""Reads what a running vLLM server says about itself over HTTP."""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from prometheus_client.parser import text_string_to_metric_families

from kvroute.contract.records import MAX_COUNT, Load, TierFacts
from kvroute.contract.unreadable import DECODE_ERRORS
from kvroute.replica.attached_engine.server_client import Reply, ServerClient, ServerLostError

OWN_SERVER = "http://replica"  # address of a server that the replica has started itself
MIN_PREFILL_S = 1.0  # seconds of prefill that a server must have measured for a speed to count
USUAL_TOKENS_PER_S = 8_000.0  # assumed prefill speed of a server that has measured none yet
# Largest share of the copies from host memory that may be under way when their size is computed.
MAX_NEW_SHARE = 0.1
METRICS = (
    "vllm:cache_config_info",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:prompt_tokens_total",
    "vllm:prefix_cache_hits_total",
    "vllm:request_prefill_time_seconds_sum",
    "vllm:external_prefix_cache_hits_total",
    "vllm:kv_offload_load_bytes_total",
    "vllm:kv_offload_load_time_total",
    "vllm:engine_sleep_state",
)
AWAKE = "vllm:engine_sleep_state:awake"


# Lines of /metrics that count calls which make a server clear its cache, or change an adapter.
CALLS = "http_requests_total{"
_CALL = re.compile(r'handler="(?:/reset_prefix_cache|/sleep|/pause|[^"]*adapter[^"]*)"')


class ServerError(Exception):
    """A server cannot be attached; the message names it and says what to do."""


@dataclass(frozen=True, slots=True)
class EventAddress:
    """Where a data parallel rank publishes its KV cache events."""

    endpoint: str
    replay_endpoint: str
    topic: str


@dataclass(frozen=True, slots=True)
class RankFacts:
    """The cache of one data parallel rank."""

    block_size: int  # tokens
    capacity_blocks: int
    prefix_caching: bool
    prefill_tokens_per_s: float
    events: EventAddress | None  # None: the rank publishes no events, or none that can be replayed


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What a server says about itself."""

    model: str  # name of the model, as the server's clients send it
    model_path: str  # name or folder that the server loaded the model from
    max_model_len: int  # tokens of prompt and answer together
    version: str  # version of vLLM; empty: unknown
    ranks: Sequence[RankFacts]
    adapters: Mapping[str, str] = field(default_factory=dict)  # LoRA adapter -> its folder there

    @property
    def block_sizes(self) -> Set[int]:
        """Return the block sizes of the ranks, in tokens."""
        return {rank.block_size for rank in self.ranks}


def misfit(
    url: str, server: ServerFacts, *, model: str, block_size: int | None, adapters: Iterable[str]
) -> str:
    """Return why a server cannot serve the cluster's clients; empty: it can.

    Args:
        url: The server's address.
        server: What the server says about itself.
        model: The name of the cluster's model at its servers; empty: any.
        block_size: The tokens of a block in the cluster.
        adapters: The LoRA adapters that clients can use.
    """
    if server.model != (model or server.model):
        return (
            f"{url} serves {server.model}, and this cluster serves {model}; start the server with "
            "this model, or remove it from the list"
        )
    if server.block_sizes != {block_size}:
        return (
            f"{url} has KV cache blocks of {', '.join(map(str, sorted(server.block_sizes)))} "
            f"tokens, and this cluster has {block_size}; start the server with --block-size "
            f"{block_size}"
        )
    if missing := sorted({*adapters} - server.adapters.keys()):
        return (
            f"{url} does not have the LoRA adapters {', '.join(missing)}; load them there, or "
            "restart kvroute, which then serves the adapters that all servers have"
        )
    return ""


def authorization(key_file: Path | None) -> Mapping[str, str]:
    """Return the header with the servers' API key; empty: they need none."""
    if key_file is None:
        return {}
    return {"authorization": f"Bearer {key_file.read_text().strip()}"}


Samples = Mapping[str, Mapping[str, tuple[float, Mapping[str, str]]]]

# What reading an answer can raise that no version of vLLM gives.
_NONSENSE = (*DECODE_ERRORS, LookupError, TypeError, AttributeError, OverflowError)


async def read_facts(server: ServerClient) -> ServerFacts:
    """Return what a server says about itself. Raises ServerError."""
    try:
        return await _read_facts(server)
    except _NONSENSE as error:
        raise ServerError(
            f"{server.url} has answered in a form that no version of vLLM has ({error!r:.200}); is "
            "it a vLLM server?"
        ) from None


async def _read_facts(server: ServerClient) -> ServerFacts:
    url = server.url
    models = (await _json(server, "/v1/models")).get("data") or []
    adapters = {str(model["id"]): str(model["root"]) for model in models if model.get("parent")}
    base = next((model for model in models if not model.get("parent")), None)
    if base is None:
        raise ServerError(f"{url}/v1/models lists no model; is a vLLM server at this address?")
    # Names are printed on a terminal and written to Redis.
    if odd := [name for name in (str(base["id"]), *adapters) if not name.isprintable()]:
        raise ServerError(f"{url} serves the model {odd[0]!a}; give it a name that can be printed")
    samples = await read_samples(server)
    caches = samples.get("vllm:cache_config_info", {})
    if not caches:
        raise ServerError(
            f"{url}/metrics has no vllm:cache_config_info; attach servers of vLLM 0.26 or newer, "
            "started without --disable-log-stats"
        )
    sources = await _optional(server, "/kv_event_sources")  # by rank; empty: no publisher
    ranks = [
        _rank(number, labels, samples, _address(url, sources.get(number)))
        for number, (_, labels) in sorted(caches.items(), key=lambda item: int(item[0]))
    ]
    return ServerFacts(
        model=str(base["id"]),
        model_path=str(base.get("root") or base["id"]),
        max_model_len=int(base.get("max_model_len") or 0),
        version=str((await _optional(server, "/version")).get("version", "")),
        ranks=ranks,
        adapters=adapters,
    )


async def read_samples(server: ServerClient) -> Samples:
    """Return the server's metrics: name -> rank -> value and labels.

    Raises:
        ServerError: The server does not answer, or not with metrics.
    """
    page = (await _get(server, "/metrics")).content.decode(errors="replace")
    content = f"\n{page}\n"
    # A page has a thousand lines, of which few are read.
    calls = filter(_CALL.search, _lines(content, CALLS))
    text = "".join([*(line for name in METRICS for line in _lines(content, name)), *calls])
    samples: dict[str, dict[str, tuple[float, Mapping[str, str]]]] = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                of_rank = samples.setdefault(_name(sample.name, sample.labels), {})
                of_rank[sample.labels.get("engine", "0")] = sample.value, sample.labels
    except _NONSENSE as error:
        raise ServerError(
            f"{server.url}/metrics cannot be read ({error}); is it a vLLM server?"
        ) from None
    return samples


def _lines(content: str, start: str) -> Iterator[str]:
    """Yield the lines that start so, of a page that begins and ends with an end of a line."""
    at = content.find(f"\n{start}")
    while at >= 0:
        end = content.find("\n", at + 1)
        yield content[at + 1 : end + 1]
        at = content.find(f"\n{start}", end)


def _name(name: str, labels: Mapping[str, str]) -> str:
    """Return the name under which a sample is kept; some samples differ only in other labels."""
    parts = (labels.get(label) for label in ("handler", "status", "sleep_state"))
    return ":".join([name, *(part for part in parts if part)])


@dataclass(frozen=True, slots=True)
class OwnerCalls:
    """The successful calls of a server since its start, by what they change."""

    clearing: float  # calls that clear the cache, unless requests use it
    adapters: float  # calls that load or unload an adapter


def calls_of(samples: Samples) -> OwnerCalls:
    """Return how often the server's owner has called it to change something."""
    clearing = adapters = 0.0
    for name in samples:
        if name.startswith("http_requests_total:") and ":2" in name:
            calls = _value(samples, name, 0)
            is_adapter = "adapter" in name
            adapters += calls * is_adapter
            clearing += calls * (not is_adapter)
    return OwnerCalls(clearing, adapters)


def is_asleep(samples: Samples) -> bool:
    """Return whether the server was put to sleep, so that requests would wait."""
    return any(value == 0.0 for value, _ in samples.get(AWAKE, {}).values())


def load_of(samples: Samples, rank: int, capacity_blocks: int) -> Load:
    """Return a rank's load."""
    used = _value(samples, "vllm:kv_cache_usage_perc", rank)
    return Load(
        running=_count(samples, "vllm:num_requests_running", rank),
        waiting=_count(samples, "vllm:num_requests_waiting", rank),
        used_blocks=int(max(0.0, min(1.0, used)) * capacity_blocks),
    )


@dataclass(frozen=True, slots=True)
class MeasuredCopies:
    """Totals of a rank's copies from host memory to the engine since the server's start."""

    tokens: float = 0.0
    bytes: float = 0.0
    seconds: float = 0.0

    def __sub__(self, before: "MeasuredCopies") -> "MeasuredCopies":
        return MeasuredCopies(
            max(0.0, self.tokens - before.tokens),
            max(0.0, self.bytes - before.bytes),
            max(0.0, self.seconds - before.seconds),
        )

    def is_stable(self, moved: "MeasuredCopies") -> bool:
        """Return whether few of these copies were begun in the last interval.

        vLLM counts the tokens when a copy begins, and the bytes when it ends.
        """
        return moved.tokens <= MAX_NEW_SHARE * self.tokens

    def tier(self, block_size: int, seen_blocks: int, gigabytes: float) -> TierFacts | None:
        """Return the tier whose copies these are; None: too little was measured.

        Args:
            block_size: The tokens of a block.
            seen_blocks: The blocks in host memory by the server's events.
            gigabytes: The size of the tier in GiB; 0: unknown.
        """
        if not (self.tokens > 0 and self.bytes > 0 and self.seconds > 0):
            return None
        block_bytes = int(max(1.0, min(self.bytes / self.tokens * block_size, MAX_COUNT)))
        blocks = int(min(gigabytes * 2**30 / block_bytes, MAX_COUNT))
        bytes_per_s = max(1.0, min(self.bytes / self.seconds, 1e15))
        return TierFacts(max(blocks, seen_blocks), block_bytes, bytes_per_s)


def copies_of(samples: Samples, rank: int) -> MeasuredCopies:
    """Return what vLLM's connector for host memory has copied to the engine."""
    return MeasuredCopies(
        _value(samples, "vllm:external_prefix_cache_hits_total", rank),
        _value(samples, "vllm:kv_offload_load_bytes_total", rank),
        _value(samples, "vllm:kv_offload_load_time_total", rank),
    )


def host_gigabytes(samples: Samples, rank: int) -> float:
    """Return the server's --kv-offloading-size in GiB, or 0 if it has none."""
    _, labels = samples.get("vllm:cache_config_info", {}).get(str(rank), (0.0, {}))
    try:
        size = float(labels.get("kv_offloading_size", 0.0))
    except ValueError:  # "None"
        return 0.0
    return size if 0.0 < size < math.inf else 0.0


def _rank(
    number: str, labels: Mapping[str, str], samples: Samples, events: EventAddress | None
) -> RankFacts:
    return RankFacts(
        block_size=int(labels["block_size"]),
        capacity_blocks=max(0, int(labels["num_gpu_blocks"]) - 1),  # vLLM never uses one block
        prefix_caching=labels.get("enable_prefix_caching") == "True",
        prefill_tokens_per_s=_prefill_tokens_per_s(samples, int(number)),
        events=events,
    )


def _prefill_tokens_per_s(samples: Samples, rank: int) -> float:
    """Return the mean prefill speed that the server has measured, or a usual one."""
    seconds = _value(samples, "vllm:request_prefill_time_seconds_sum", rank)
    tokens = _value(samples, "vllm:prompt_tokens_total", rank)
    computed = tokens - _value(samples, "vllm:prefix_cache_hits_total", rank)
    if seconds < MIN_PREFILL_S or computed <= 0:
        return USUAL_TOKENS_PER_S
    return computed / seconds


def _value(samples: Samples, name: str, rank: int) -> float:
    """Return a value, or 0 if it is missing or not finite."""
    value, _ = samples.get(name, {}).get(str(rank), (0.0, {}))
    return value if math.isfinite(value) else 0.0


def _count(samples: Samples, name: str, rank: int) -> int:
    return int(max(0.0, min(_value(samples, name, rank), MAX_COUNT)))


def _address(url: str, source: Any) -> EventAddress | None:
    """Return where a rank's events can be received, and requested again."""
    if not isinstance(source, dict) or source.get("enable_kv_cache_events") is False:
        return None
    endpoint, replay = source.get("endpoint"), source.get("replay_endpoint")
    if not endpoint or not replay:
        return None
    host = urlsplit(url).hostname or ""
    host = f"[{host}]" if ":" in host else host
    endpoint, replay = (_reachable(str(address), host) for address in (endpoint, replay))
    return EventAddress(endpoint, replay, str(source.get("topic") or ""))


def _reachable(address: str, host: str) -> str:
    """Return an address that the server listens on, as other machines reach it."""
    return address.replace("//*:", f"//{host}:").replace("//0.0.0.0:", f"//{host}:")


async def _optional(server: ServerClient, path: str) -> Mapping[str, Any]:
    """Return a JSON object, or an empty one if the server has no such route."""
    try:
        return await _json(server, path)
    except ServerError:
        return {}


async def _json(server: ServerClient, path: str) -> Mapping[str, Any]:
    reply = await _get(server, path)
    try:
        body = reply.decoded()
    except DECODE_ERRORS:
        body = None
    if not isinstance(body, dict):
        raise ServerError(
            f"{server.url}{path} has not answered with a JSON object; is it a vLLM server?"
        )
    return body


def silence(url: str, error: ServerLostError) -> str:
    """Return that a server does not answer, and what to do."""
    if url == OWN_SERVER:
        return f"the replica's vLLM server does not answer ({error})"
    return f"{url} does not answer ({error}); {error.remedy}"


async def _get(server: ServerClient, path: str) -> Reply:
    try:
        reply = await server.get(path)
    except ServerLostError as error:
        raise ServerError(silence(server.url, error)) from None
    if reply.is_ok:
        return reply
    has_answered = f"{server.url}{path} has answered with status {reply.status}"
    if reply.status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
        raise ServerError(
            f"{has_answered}; set --attach-key-file to a file with the API key of your servers"
        )
    if reply.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        raise ServerError(f"{has_answered}; see the server's log")
    raise ServerError(f"{has_answered}; expected a vLLM server, not a proxy in front of one")
