"""Options that have no effect without another option; they are refused with the reason."""

from collections.abc import Callable, Collection, Container, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from kvroute.features import FEATURES
from kvroute.settings import parsers
from kvroute.settings.help import SettingsError, flags
from kvroute.settings.options.model import ModelOptions
from kvroute.settings.server_list import names_servers


@dataclass(frozen=True, slots=True)
class Need:
    """What some options need."""

    options: Collection[str]  # names of these options
    is_met: Callable[[Any], bool]  # gets the options of a model (ModelOptions)
    text: str  # the message: which option is missing, and how to set it


def has_host_cache(options: ModelOptions) -> bool:
    """Return whether replicas have host memory for blocks."""
    return parsers.size_bytes(options.host_cache_gb, of_bytes=1 << 30) > 0


def _is_attached(options: ModelOptions) -> bool:
    return names_servers(options)


HOST_CACHE = "host memory for blocks: add --host-cache-gb, such as --host-cache-gb 30%"
NEEDS = (
    Need(("disk_cache",), has_host_cache, HOST_CACHE),
    Need(("disk_cache_gb",), lambda options: options.disk_cache is not None, "--disk-cache FOLDER"),
    Need(
        ("host_cache_gb",),
        lambda options: options.engine_hooks == "on",
        "kvroute's changes to vLLM: set --engine-hooks on",
    ),
    Need(
        ("host_cache_gb", "pin_share"),
        lambda options: options.prefix_caching,
        "the cache: leave out --no-prefix-caching",
    ),
    Need(
        ("target_wait_s", "shrink_delay_s"),
        lambda options: options.max_replicas is not None,
        "a fleet that scales: add --max-replicas",
    ),
    Need(
        ("own_replicas", "attach_key_file"),
        _is_attached,
        "a server of yours: add --attach URL, --attach-file FILE or --attach-dns NAME:PORT",
    ),
    Need(
        ("replicas",),
        lambda options: not _is_attached(options),
        "engines that kvroute starts: with --attach, set --own-replicas instead",
    ),
    Need(
        (
            *("gpus_per_replica", "data_parallel_size", "kv_cache_memory_mb", "host_cache_gb"),
            *("dtype", "max_model_len", "max_num_seqs"),
        ),
        lambda options: not _is_attached(options) or options.own_replicas > 0,
        "engines that kvroute starts: with --attach, set it at your servers, or add --own-replicas",
    ),
    Need(
        ("max_lora_rank",),
        lambda options: options.lora_root is not None,
        "a folder of added adapters: add --lora-root FOLDER",
    ),
    Need(
        ("max_loras", "max_cpu_loras"),
        lambda options: bool(options.lora or options.lora_root),
        "adapters: add --lora NAME=FOLDER or --lora-root FOLDER",
    ),
    Need(
        ("metrics_port_range", "metrics_token_file"),
        lambda options: options.metrics,
        "metrics: leave out --no-metrics",
    ),
    Need(("wire_tls_cert", "wire_tls_key", "wire_tls_ca"), lambda o: o.wire_tls, "--wire-tls"),
    Need(
        (
            *("simulated_prefill_tokens_per_s", "simulated_decode_ms"),
            *("simulated_blocks", "simulated_host_gb_per_s"),
        ),
        lambda options: options.engine == "simulated",
        "--engine simulated",
    ),
    Need(("simulated_host_gb_per_s",), has_host_cache, HOST_CACHE),
)


def refuse_unmet(models: Sequence[ModelOptions], names: Container[str]) -> None:
    """Refuse options that have no effect on any of these models.

    Args:
        models: The options of each model.
        names: The names of the options to check.

    Raises:
        SettingsError: Some options are set, and what they need is not; the message has a line for
            each.
    """
    lines = [
        f"{_flag(name)} is {str(value)!r}, which needs {need.text}; or leave {_flag(name)} out"
        for need in (*NEEDS, *chain.from_iterable(feature.needs() for feature in FEATURES))
        for name in need.options
        if name in names and not any(need.is_met(model) for model in models)
        for value in _set_values(models, name)
    ]
    if lines:
        raise SettingsError("\n".join(dict.fromkeys(lines)))


def _set_values(models: Sequence[ModelOptions], name: str) -> Iterator[object]:
    """Yield the values of an option that differ from its default."""
    default = ModelOptions.model_fields[name].default
    yield from (value for model in models if (value := getattr(model, name)) != default)


def _flag(name: str) -> str:
    return flags(name, ModelOptions.model_fields[name])[0].partition("/")[0]
