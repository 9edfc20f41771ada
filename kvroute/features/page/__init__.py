"""The live page: what a router does, in a browser, with its fleet and the last hour.

README.md explains the parts.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from kvroute.features.feature import Feature, Paths

if TYPE_CHECKING:
    from fastapi import APIRouter
    from pydantic import BaseModel

    from kvroute.features.page.router_page import RouterPage
    from kvroute.router.serving.router_base import RouterBase


class LivePage(Feature):
    """The page, its stream of events, and the samples of its charts."""

    name = "page"
    paths = Paths(everybody=("/ui",))  # the events that it shows need the role observe

    def options(self) -> "type[BaseModel]":
        from kvroute.features.page.page_options import PageOptions

        return PageOptions

    def router(self, base: "RouterBase") -> "RouterPage | None":
        from kvroute.features.page.page_options import PageOptions
        from kvroute.features.page.router_page import RouterPage

        return RouterPage() if base.settings.of(self.name, PageOptions).ui else None

    def routes(self) -> "Sequence[APIRouter]":
        from kvroute.features.page import page_routes

        return [page_routes.routes]

    def first_steps(self, options: Any, url: str) -> Iterable[str]:
        return [f"live page: {url}/ui"] if options.ui else []
