"""HAProxy's own health check, /-/healthz, fails while the cluster stops."""

import re
import socket
from contextlib import closing, suppress
from pathlib import Path

ADMIN_SOCKET = "admin.sock"  # in the node's folder within the cluster's own
STOPPING = "proc.stopping"  # a variable of HAProxy's process
STATEMENT = f"experimental-mode on; set var {STOPPING} bool(true)\n"
RULE = (
    "    http-request return status 503 content-type text/plain string stopping hdr retry-after 1 "
    f"if healthcheck {{ var({STOPPING}) -m bool }}\n"
)


def failing_when_told(config: str) -> str:
    """Return Serve's configuration with a rule for a HAProxy that was told of a stop."""
    return re.sub(r"^( +acl healthcheck .*\n)", rf"\g<1>{RULE}", config, flags=re.MULTILINE)


def tell_of_stop(folder: Path) -> None:
    """Have each HAProxy of the cluster with this folder fail its health checks from now on."""
    for path in folder.glob(f"*/{ADMIN_SOCKET}"):
        with closing(socket.socket(socket.AF_UNIX)) as client, suppress(OSError):  # it has ended
            client.settimeout(1.0)
            client.connect(str(path))
            client.sendall(STATEMENT.encode())
            client.recv(1024)
