"""Writes Grafana's dashboards, one file each: `python -m dashboards.build`."""

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
    """Return the content of each file."""
    return {
        FOLDER / f"{each.uid.removeprefix('kvroute-')}.json": json.dumps(each.to_json(), indent=1)
        + "\n"
        for each in DASHBOARDS
    }


if __name__ == "__main__":
    for path, text in files().items():
        path.write_text(text)
