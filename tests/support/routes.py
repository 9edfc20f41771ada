"""All routes of a router."""

from collections.abc import Iterable, Iterator

from fastapi import APIRouter
from starlette.routing import Route

from kvroute.router.application import core_routes, feature_routes


def routes(
    groups: Iterable[APIRouter] = (*core_routes(), *feature_routes()),
) -> Iterator[tuple[str, str]]:
    """Yield the method and path of each route: of all, or of these groups."""
    for group in groups:
        for route in group.routes:
            assert isinstance(route, Route)
            for method in route.methods or ():
                yield method, route.path
