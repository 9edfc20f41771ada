"""Makes HAProxy's health check /-/healthz fail while the cluster stops.

Load balancers then send no more requests to the cluster.
"""

import re
import socket
from contextlib import closing, suppress
from pathlib import Path

ADMIN_SOCKET = "admin.sock"  # file of HAProxy's admin socket, in the node's folder
STOPPING = "proc.stopping"  # HAProxy's process variable: true while the cluster stops
STATEMENT = f"experimental-mode on; set var {STOPPING} bool(true)\n"  # sets STOPPING
RULE = (  # makes health checks fail while STOPPING is set
    "    http-request return status 503 content-type text/plain string stopping hdr retry-after 1 "
    f"if healthcheck {{ var({STOPPING}) -m bool }}\n"
)


def with_stopping_rule(config: str) -> str:
    """Return Serve's configuration with a rule that fails health checks while STOPPING is set."""
    return re.sub(r"^( +acl healthcheck .*\n)", rf"\g<1>{RULE}", config, flags=re.MULTILINE)


def fail_health_checks(folder: Path) -> None:
    """Set STOPPING in each HAProxy of the cluster, so that it answers health checks with 503.

    Args:
        folder: The cluster's folder, which has a folder with an admin socket for each node.
    """
    for path in folder.glob(f"*/{ADMIN_SOCKET}"):
        # If this HAProxy has ended, connect() raises an OSError.
        with closing(socket.socket(socket.AF_UNIX)) as client, suppress(OSError):
            client.settimeout(1.0)
            client.connect(str(path))
            client.sendall(STATEMENT.encode())
            client.recv(1024)
