"""All routes of a router."""

from collections.abc import Iterator

from kvroute.router.endpoints import (
    batch_routes,
    cluster_routes,
    docs_routes,
    file_routes,
    openai_routes,
    prefix_routes,
    response_routes,
    session_routes,
    ui_routes,
)


def routes() -> Iterator[tuple[str, str]]:
    """Yield the method and path of each route."""
    requests = (openai_routes, response_routes, session_routes, file_routes, batch_routes)
    for kind in (*requests, prefix_routes, cluster_routes, docs_routes, ui_routes):
        for route in kind.routes.routes:
            for method in route.methods:
                yield method, route.path
