"""What tenants use of one model, in one router: their accounts, and the reports of their limits."""

from collections.abc import Coroutine, Mapping
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry

from kvroute.features.keys.accounting.accounts import Accounts
from kvroute.features.keys.accounting.daily_accounts import DailyAccounts
from kvroute.features.keys.accounting.lasting_accounts import LastingAccounts
from kvroute.features.keys.accounting.tenant_metrics import TenantMetrics
from kvroute.features.keys.key_gate import KeyGate
from kvroute.features.keys.router_limits import TenantReport
from kvroute.features.router_feature import RouterFeature
from kvroute.process.exposition import Readings
from kvroute.router.serving.router_base import RouterBase

encode, decode = msgspec.msgpack.encode, msgspec.msgpack.Decoder(TenantReport).decode


class RouterKeys(RouterFeature):
    """The usage of tenants, for one model in one router."""

    name = "keys"
    hears_all = True  # routers of other Ray clusters have the same tenants

    def __init__(self, base: RouterBase) -> None:
        gate = base.gate
        assert isinstance(gate, KeyGate)
        # Only the first model's Redis channel carries tenants' counts to the other routers.
        self._limits = None if gate.accounts else gate.counts
        store = DailyAccounts(
            base.redis, base.model, cluster=base.cluster, unreadable=base.unreadable
        )
        self._lasting = gate.accounts[base.model] = LastingAccounts(store, base.router_id)
        gpus = base.settings.tensor_parallel_size
        self.observer = self._accounts = Accounts(gpus=gpus, keep=self._lasting.add)
        if self._limits is not None:
            self._limits.on_change = lambda: self.on_change()

    def metrics(self, registry: CollectorRegistry, readings: Readings) -> None:
        registry.register(TenantMetrics(self._accounts))

    def tasks(self) -> Mapping[str, Coroutine[Any, Any, None]]:
        return {"accounts": self._lasting.run()}

    def share(self, now_s: float) -> bytes | None:
        report = self._limits and self._limits.report(now_s)
        return encode(report) if report and (report.counts or report.is_complete) else None

    def receive(self, router: str, data: bytes | None, now_s: float) -> None:
        if self._limits and data is not None:
            self._limits.receive(router, decode(data), now_s)

    def forget(self, router: str) -> None:
        if self._limits:
            self._limits.forget(router)

    def connected(self, is_connected: bool, now_s: float) -> None:
        if self._limits:
            self._limits.rejoin(now_s) if is_connected else self._limits.cut_off(now_s)
