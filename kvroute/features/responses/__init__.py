"""Stored responses, conversations, and responses that run in the background (Responses API).

All three are in Redis, so it does not matter which router a client reaches. README.md explains the
parts. Without them, /v1/responses answers each call by itself.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from kvroute.contract.error_codes import FeatureCode
from kvroute.contract.unreadable import FOREIGN, FeatureKind
from kvroute.features.feature import Feature, Paths

if TYPE_CHECKING:
    from fastapi import APIRouter
    from pydantic import BaseModel

    from kvroute.features.responses.router_responses import RouterResponses
    from kvroute.features.router_service import RouterService
    from kvroute.router.serving.router_base import RouterBase
    from kvroute.settings.needs import Need

LOCKED = FeatureCode("conversation_locked")
PREVIOUS_NOT_FOUND = FeatureCode("previous_response_not_found")
RESPONSE, CONVERSATION = FeatureKind("response"), FeatureKind("conversation")  # its records


class StoredResponses(Feature):
    """Responses that clients can read, continue, and leave to run."""

    name = "responses"
    codes = (LOCKED, PREVIOUS_NOT_FOUND)
    unreadable: ClassVar[Mapping[FeatureKind, str]] = {
        CONVERSATION: f"it is lost; do all routers have the same version? {FOREIGN}",
        RESPONSE: f"its conversation is lost; do all routers have the same version? {FOREIGN}",
    }
    paths = Paths(use=("/v1/conversations",), repeated=("/v1/responses/compact",))
    once: ClassVar[Mapping[str, Sequence[str]]] = {"/v1/responses": ("background", "conversation")}

    def options(self) -> "type[BaseModel]":
        from kvroute.features.responses.response_options import ResponseOptions

        return ResponseOptions

    def needs(self) -> "Sequence[Need]":
        from kvroute.settings.needs import Need

        return [
            Need(
                ("response_ttl_s",),
                lambda options: options.response_store_mb > 0,
                "a store of responses: add --response-store-mb, such as --response-store-mb 256",
            )
        ]

    def router(self, base: "RouterBase") -> "RouterResponses":
        from kvroute.features.responses.router_responses import RouterResponses

        return RouterResponses(base)

    def service(self, base: "RouterBase") -> "RouterService | None":
        from kvroute.features.responses.background.background_responses import background_responses

        return background_responses(base)

    def routes(self) -> "Sequence[APIRouter]":
        from kvroute.features.responses import (
            compact_routes,
            conversation_routes,
            response_routes,
        )

        return [compact_routes.routes, response_routes.routes, conversation_routes.routes]
