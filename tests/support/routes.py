"""All routes of a router."""

from collections.abc import Iterator

from kvroute.router.ingress import ROUTE_MODULES


def routes() -> Iterator[tuple[str, str]]:
    """Yield the method and path of each route."""
    for module in ROUTE_MODULES:
        for route in module.routes.routes:
            for method in route.methods:
                yield method, route.path
