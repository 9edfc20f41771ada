"""How much of the fleet's time each tenant has recently used."""

import math
from collections.abc import Iterable

SHARE_S = 30.0  # time constant in seconds with which a tenant's recorded use decays
SCARCE_S = 30.0  # after a tenant has waited, the others' shares are limited for this many seconds
# A tenant exceeds its share if it has used more than this multiple of an equal share.
LEEWAY = 1.5
MAX_SHARERS = 16  # with more tenants, an equal share is still 1 / 16 of the time
MAX_TENANTS = 4096  # tenants that are counted; further tenants never exceed their share
FORGOTTEN_S = 1e-3  # a tenant's use below this many seconds of prefill is dropped


class Shares:
    """Seconds of prefill that each tenant has recently used. Cached tokens are free.

    A tenant can only exceed its share while other tenants have to wait.
    """

    def __init__(self) -> None:
        self._used_s: dict[str, float] = {}  # tenant -> seconds of prefill, as of _updated_s
        self._total_s = 0.0
        self._updated_s = 0.0
        self._waited_s: dict[str, float] = {}  # tenant -> time at which it last waited

    def use(self, tenant: str, prefill_s: float, now_s: float) -> None:
        """Count the prefill of a request that is sent to a replica."""
        self._decay(now_s)
        if tenant and (tenant in self._used_s or len(self._used_s) < MAX_TENANTS):
            self._used_s[tenant] = self._used_s.get(tenant, 0.0) + prefill_s
            self._total_s += prefill_s

    def note_waiting(self, tenants: Iterable[str], now_s: float) -> None:
        """Record that requests of these tenants wait in the default line."""
        self._decay(now_s)
        self._waited_s.update(dict.fromkeys(tenants, now_s))

    def are_exceeded(self, tenant: str) -> bool:
        """Return whether the tenant has used more than its share while other tenants waited."""
        used_s = self._used_s.get(tenant, 0.0)
        sharers = min(MAX_SHARERS, len(self._used_s))
        if sharers < 2 or used_s <= LEEWAY * self._total_s / sharers:
            return False
        return any(waiting != tenant for waiting in self._waited_s)

    def _decay(self, now_s: float) -> None:
        """Let earlier use decay, at most once a second."""
        if now_s - self._updated_s < 1.0:
            return
        keep = math.exp((self._updated_s - now_s) / SHARE_S)
        used_s = {tenant: keep * used_s for tenant, used_s in self._used_s.items()}
        self._used_s = {tenant: used for tenant, used in used_s.items() if used > FORGOTTEN_S}
        self._total_s = sum(self._used_s.values())
        self._waited_s = {
            tenant: waited_s
            for tenant, waited_s in self._waited_s.items()
            if now_s - waited_s < SCARCE_S
        }
        self._updated_s = now_s
