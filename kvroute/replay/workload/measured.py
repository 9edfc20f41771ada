"""What a request log says about one request, besides what every trace has.

router/observability/request_log.py writes the fields. Older logs lack some of them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Measured:
    """The measured times of one request, and the replica that answered it."""

    replica: str
    queued_s: float  # seconds in the router's queue
    ttft_s: float | None  # seconds from sending to the first token; None: there was none
    duration_s: float  # seconds from sending to the end
    cached_tokens: int  # prompt tokens that the engine found in its cache
    host_tokens: int  # cached tokens that were reloaded from host memory
    replicas: int | None  # number of replicas among which the router chose; None: an older log
    kv_tokens: int | None  # the replica's KV cache, in tokens; None: unknown
    step_tokens: int | None  # maximum tokens in a step of its engine; None: an older log
    attention_tokens: float | None  # see PrefillModel; None: an older log


def measured(row: Mapping[str, Any]) -> Measured | None:
    """Return what a line of a request log has measured; None if the line is of another trace."""
    if row.get("replica") is None or row.get("duration_s") is None:
        return None
    ttft_s = row.get("ttft_s")
    return Measured(
        replica=str(row["replica"]),
        queued_s=float(row.get("queued_s") or 0.0),
        ttft_s=None if ttft_s is None else float(ttft_s),
        duration_s=float(row["duration_s"]),
        cached_tokens=int(row.get("cached_tokens") or 0),
        host_tokens=int(row.get("host_tokens") or 0),
        replicas=_positive(row.get("replicas")),
        kv_tokens=_positive(row.get("kv_tokens")),
        step_tokens=_positive(row.get("step_tokens")),
        attention_tokens=float(row.get("attention_tokens") or 0.0) or None,
    )


def _positive(count: Any) -> int | None:
    """Return the count; None if it is missing or not positive."""
    return int(count) if count and int(count) > 0 else None
