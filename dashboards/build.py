"""Writes one file for each Grafana dashboard: `python -m dashboards.build`."""

import json
from pathlib import Path

from dashboards.cache_hits import CACHE_HITS
from dashboards.fleet import FLEET
from dashboards.replica import REPLICA
from dashboards.routing import ROUTING
from dashboards.tenants import TENANTS

DASHBOARDS = (FLEET, CACHE_HITS, ROUTING, REPLICA, TENANTS)
FOLDER = Path(__file__).parent


def files() -> dict[Path, str]:
    """Return file -> its content, for all dashboards."""
    return {
        FOLDER / f"{dashboard.uid.removeprefix('kvroute-')}.json": json.dumps(
            dashboard.to_json(), indent=1
        )
        + "\n"
        for dashboard in DASHBOARDS
    }


if __name__ == "__main__":
    for path, text in files().items():
        path.write_text(text)
