"""Gaps: replicas limit the time between two tokens of an answer, while prompts are computed.

README.md explains the parts.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from kvroute.features.feature import Feature, FeatureSettings, TermText

if TYPE_CHECKING:
    from pydantic import BaseModel

    from kvroute.features.gaps.engine_gaps import EngineGaps
    from kvroute.features.gaps.placed_gaps import PlacedGaps
    from kvroute.features.gaps.router_gaps import RouterGaps
    from kvroute.router.serving.router_base import RouterBase
    from kvroute.settings.needs import Need

# The environment variable that gives both limits to engines, in milliseconds.
LIMITS = "KVROUTE_ENGINE_GAPS"
HEADER = "x-kvroute-tpot-ms"


class GapLimits(Feature):
    """The limit of the time between two tokens. It is off without --slo-tpot-ms."""

    name = "gaps"
    headers = (HEADER,)
    policies = ("gaps",)
    terms: ClassVar[Mapping[str, TermText]] = {
        "gaps": TermText(
            label="answers that wait for the prompt",
            reason="on {other}, the prompt would delay more answers; that counts as {seconds}",
        )
    }

    def options(self) -> "type[BaseModel]":
        from kvroute.features.gaps.gap_options import GapOptions

        return GapOptions

    def settings(self, options: Any) -> FeatureSettings:
        if not options.slo_tpot_ms:
            return FeatureSettings()
        return FeatureSettings(
            routers={"slo_tpot_ms": options.slo_tpot_ms},
            environment={LIMITS: f"{options.slo_tpot_ms} {options.slo_ttft_ms}"},
        )

    def needs(self) -> "Sequence[Need]":
        from kvroute.settings.needs import Need
        from kvroute.settings.server_list import names_servers

        return [
            Need(
                ("slo_ttft_ms",),
                lambda options: options.slo_tpot_ms > 0,
                "a limit of the time between tokens: add --slo-tpot-ms, such as --slo-tpot-ms 30",
            ),
            Need(
                ("slo_tpot_ms",),
                lambda options: not names_servers(options) or options.own_replicas > 0,
                "engines that kvroute starts: leave out --attach, or add --own-replicas",
            ),
            Need(
                ("slo_tpot_ms",),
                lambda options: options.engine_hooks == "on",
                "kvroute's changes to vLLM: set --engine-hooks on",
            ),
        ]

    def router(self, base: "RouterBase") -> "RouterGaps | None":
        from kvroute.features.gaps.gap_options import GapOptions
        from kvroute.features.gaps.router_gaps import RouterGaps

        return RouterGaps() if base.settings.of(self.name, GapOptions).slo_tpot_ms else None

    def engine(self, environment: Mapping[str, str]) -> "EngineGaps | None":
        from kvroute.features.gaps.engine_gaps import EngineGaps

        if not (limits := environment.get(LIMITS)):
            return None
        tpot_s, ttft_s = (float(limit) / 1000 for limit in limits.split())
        return EngineGaps(tpot_s=tpot_s, ttft_s=ttft_s)

    def replayed(self, policy: str = "") -> "PlacedGaps | None":
        from kvroute.features.gaps.placed_gaps import PlacedGaps

        return PlacedGaps() if policy == "gaps" else None
