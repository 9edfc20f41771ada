"""Which role each HTTP route needs, if a feature closes the gate (features/gate.py)."""

from collections.abc import Iterable, Sequence
from functools import lru_cache

from kvroute.features import PATHS
from kvroute.features.gate import ROLES, Role
from kvroute.router.api.calls import (
    CHAT_COMPLETIONS,
    COMPLETIONS,
    MESSAGES,
    RESPONSES,
    STATELESS_ROUTES,
)
from kvroute.router.api.scoring import SCORING

# Everybody may use these.
EVERYBODY = ("/health", "/ping", "/docs", "/openapi.json", *PATHS.everybody)
ANY = ("/v1/models", "/version")  # any role
USE = (  # the role use
    *(CHAT_COMPLETIONS, COMPLETIONS, RESPONSES, MESSAGES, SCORING, *STATELESS_ROUTES),
    "/v1/route",
    *PATHS.use,
)
OBSERVE = ("/v1/cluster", "/v1/metrics/targets", "/metrics", *PATHS.observe)  # the role observe


@lru_cache(maxsize=1024)
def roles_for(method: str, path: str) -> Sequence[Role]:
    """Return the roles that may use a route: a caller needs one of them. Empty: everybody may.

    A route that is in none of the lists above or of PATHS needs the role manage.
    """
    if path == "/" or _is_in(path, EVERYBODY):
        return ()
    if _is_in(path, ANY):
        return ROLES
    if _is_in(path, PATHS.manage):
        return ("manage",)
    if _is_in(path, OBSERVE) or (method in ("GET", "HEAD") and _is_in(path, PATHS.read)):
        return ("observe",)
    return ("use",) if _is_in(path, USE) else ("manage",)


def _is_in(path: str, routes: Iterable[str]) -> bool:
    return any(path == route or path.startswith(f"{route}/") for route in routes)
