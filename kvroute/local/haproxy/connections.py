"""How many connections HAProxy holds, and for how long one may stay idle."""

import re
import resource

from kvroute.process.memory import memory_bytes

DEFAULT_IDLE_S = 90.0
FILES_EACH = 2  # to a client and to a router
OTHER_FILES = 500  # listeners, health checks, HAProxy's own
BYTES_EACH = 64_000  # of a connection with TLS; requests have buffers besides
MEMORY_SHARE = 1 / 8
NEAR = 0.8  # of the limit; from there on, a connection is closed behind its response


def limited(config: str, *, most: int, idle_s: float) -> str:
    """Return Serve's configuration with these limits.

    Idle connections never fill more than the share NEAR. The rest is for those that are in use, for
    health checks and for refusals. Of clients that owe a TLS handshake, a part of a body, or an
    acknowledgement of what was sent, HAProxy has one limit. So it is no shorter than the default.

    Args:
        most: connections of clients.
        idle_s: seconds without a request, after a first one.
    """
    near = int(most * NEAR)
    close = f"    http-after-response set-header connection close if {{ fe_conn ge {near} }}\n"
    for pattern, replacement in (
        (r"^( +maxconn) .*", rf"\g<1> {most}"),
        (r"^( +timeout http-keep-alive) .*", rf"\g<1> {int(idle_s * 1000)}ms"),
        (r"^( +timeout client) .*", rf"\g<1> {int(max(idle_s, DEFAULT_IDLE_S) * 1000)}ms"),
        (r"^(frontend http_frontend\n\s+bind .*\n)", rf"\g<1>{close}"),
    ):
        config = re.sub(pattern, replacement, config, flags=re.MULTILINE)
    return config


def most_connections() -> int:
    """Return how many connections this process may have files and memory for."""
    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)
    by_memory = int(memory_bytes() * MEMORY_SHARE / BYTES_EACH)
    if files == resource.RLIM_INFINITY:
        return by_memory
    return min(by_memory, max(files - OTHER_FILES, files // 2) // FILES_EACH)
