"""Named prefixes: texts that replicas keep cached for the prompts that begin with them.

A client declares a prefix under a name, at run time or in a file at the start. Requests send the
name in place of the text. README.md explains the parts.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from kvroute.contract.error_codes import FeatureCode
from kvroute.contract.unreadable import FeatureKind
from kvroute.features.feature import Feature, FeatureSettings, Paths

if TYPE_CHECKING:
    import typer
    from fastapi import APIRouter
    from pydantic import BaseModel

    from kvroute.features.prefixes.replica_prefixes import ReplicaPrefixes
    from kvroute.features.prefixes.router_prefixes import RouterPrefixes
    from kvroute.features.replica_feature import ReplicaBase
    from kvroute.router.serving.router_base import RouterBase


# The codes of its errors.
NOT_FOUND = FeatureCode("prefix_not_found")
OF_ANOTHER_TENANT = FeatureCode("prefix_of_another_tenant")
TOO_MANY = FeatureCode("too_many_prefixes")
TENANT_HAS_TOO_MANY = FeatureCode("tenant_prefixes_exceeded")
TENANT_PINS_TOO_MUCH = FeatureCode("tenant_pins_exceeded")
CANNOT_PIN = FeatureCode("pin_budget_exceeded")
KIND = FeatureKind("prefix")  # of its records in Redis
GROUP = "Named prefixes"  # heading of its options


class NamedPrefixes(Feature):
    """The named prefixes."""

    name = "prefixes"
    unreadable: ClassVar[Mapping[FeatureKind, str]] = {
        KIND: "declare it again, or drop it: kvroute prefixes rm ID"
    }
    misses: ClassVar[Mapping[str, str]] = {
        "spilled": "declare prefixes that many prompts share: kvroute prefixes add",
        "unpinned": "kvroute prefixes list shows how many replicas have the named prefixes",
    }
    groups = (GROUP,)
    headers = ("x-kvroute-prefix",)
    fields = ("prefix_id", "task_id")
    codes = (
        *(NOT_FOUND, OF_ANOTHER_TENANT, TOO_MANY, TENANT_HAS_TOO_MANY, TENANT_PINS_TOO_MUCH),
        CANNOT_PIN,
    )
    paths = Paths(read=("/v1/prefixes",))

    def options(self) -> "type[BaseModel]":
        from kvroute.features.prefixes.prefix_options import PrefixOptions

        return PrefixOptions

    def settings(self, options: Any) -> FeatureSettings:
        from kvroute.features.prefixes.prefix_options import tasks_of

        tasks = tasks_of(options)
        return FeatureSettings(
            {"tasks": [task.model_dump() for task in tasks]},
            {"declared": [task.task_id for task in tasks]},
        )

    def router(self, base: "RouterBase") -> "RouterPrefixes":
        from kvroute.features.prefixes.prefix_options import PrefixSettings
        from kvroute.features.prefixes.router_prefixes import RouterPrefixes

        return RouterPrefixes(base, base.settings.of(self.name, PrefixSettings).tasks)

    def replica(self, base: "ReplicaBase") -> "ReplicaPrefixes":
        from kvroute.features.prefixes.prefix_options import ReplicaPrefixSettings
        from kvroute.features.prefixes.replica_prefixes import ReplicaPrefixes

        return ReplicaPrefixes(base, base.settings.in_replica(self.name, ReplicaPrefixSettings))

    def routes(self) -> "Sequence[APIRouter]":
        from kvroute.features.prefixes.prefix_routes import routes

        return [routes]

    def commands(self) -> "Mapping[str, typer.Typer]":
        from kvroute.features.prefixes.prefixes_command import prefixes

        return {"prefixes": prefixes}
