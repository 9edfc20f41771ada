"""LoRA adapters that operators add and remove while a cluster runs.

README.md explains the parts. The adapters of --lora, and how engines load adapters, are no part of
this feature.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from kvroute.contract.error_codes import FeatureCode
from kvroute.contract.unreadable import FeatureKind
from kvroute.features.feature import Feature, Paths

if TYPE_CHECKING:
    import typer
    from fastapi import APIRouter

    from kvroute.features.adapters.replica_adapters import ReplicaAdapters
    from kvroute.features.adapters.router_adapters import RouterAdapters
    from kvroute.features.replica_feature import ReplicaBase
    from kvroute.router.serving.router_base import RouterBase

TENANT_ADAPTERS_EXCEEDED = FeatureCode("tenant_adapters_exceeded")
TOO_MANY_ADAPTERS = FeatureCode("too_many_adapters")
KIND = FeatureKind("adapter")  # of its records in Redis


class AddedLater(Feature):
    """The adapters that operators add and remove. It is off without --lora-root."""

    name = "adapters"
    unreadable: ClassVar[Mapping[FeatureKind, str]] = {
        KIND: "add it again: kvroute adapters add NAME FOLDER"
    }
    codes = (TENANT_ADAPTERS_EXCEEDED, TOO_MANY_ADAPTERS)
    paths = Paths(
        read=["/v1/adapters"], manage=["/v1/load_lora_adapter", "/v1/unload_lora_adapter"]
    )

    def router(self, base: "RouterBase") -> "RouterAdapters":
        from kvroute.features.adapters.router_adapters import RouterAdapters

        return RouterAdapters(base)

    def replica(self, base: "ReplicaBase") -> "ReplicaAdapters":
        from kvroute.features.adapters.replica_adapters import ReplicaAdapters

        return ReplicaAdapters(base)

    def routes(self) -> "Sequence[APIRouter]":
        from kvroute.features.adapters.adapter_routes import routes

        return [routes]

    def commands(self) -> "Mapping[str, typer.Typer]":
        from kvroute.features.adapters.adapters_command import adapters

        return {"adapters": adapters}
