"""API keys, and the limits and accounts of tenants, to whom the keys belong.

With --api-keys, this feature closes the gate before the HTTP routes: each request needs a key with
the role of its route, and the limits of its tenant. Routers count what tenants use. README.md
explains the parts.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from kvroute.contract.error_codes import FeatureCode
from kvroute.contract.unreadable import FOREIGN, FeatureKind
from kvroute.features.feature import Feature, Paths

if TYPE_CHECKING:
    import typer
    from fastapi import APIRouter

    from kvroute.features.feature import CheckOptions
    from kvroute.features.keys.key_gate import KeyGate
    from kvroute.features.keys.router_keys import RouterKeys
    from kvroute.router.serving.router_base import RouterBase
    from kvroute.settings.router import RouterSettings

OVER_LIMIT = FeatureCode("rate_limit_exceeded")  # code of its errors
ACCOUNT = FeatureKind("account")  # of its records in Redis


class ApiKeys(Feature):
    """API keys, and the limits and accounts of tenants."""

    name = "keys"
    unreadable: ClassVar[Mapping[FeatureKind, str]] = {
        ACCOUNT: f"the usage that it counted is lost; {FOREIGN}"
    }
    codes = (OVER_LIMIT,)
    paths = Paths(observe=("/v1/cluster/tenants",))

    def before_start(self) -> "Mapping[str, CheckOptions]":
        from kvroute.features.keys.key_file import check_keys

        return {"keys": lambda settings: check_keys(settings.api_keys)}

    def gate(self, settings: "RouterSettings") -> "KeyGate | None":
        from kvroute.features.keys.key_gate import KeyGate

        return KeyGate(settings.api_keys) if settings.api_keys else None

    def router(self, base: "RouterBase") -> "RouterKeys | None":
        if base.gate.is_open:
            return None
        from kvroute.features.keys.router_keys import RouterKeys

        return RouterKeys(base)

    def routes(self) -> "Sequence[APIRouter]":
        from kvroute.features.keys.accounting.tenant_routes import routes

        return [routes]

    def commands(self) -> "Mapping[str, typer.Typer | Callable[..., None]]":
        from kvroute.features.keys.accounting.tenants_command import tenants
        from kvroute.features.keys.keys_command import keys

        return {"keys": keys, "tenants": tenants}
