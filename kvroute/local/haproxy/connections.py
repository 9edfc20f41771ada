"""HAProxy's limits: how many client connections it accepts, and how long they may be idle."""

import re
import resource

from kvroute.process.memory import memory_bytes

DEFAULT_IDLE_S = 90.0  # default of --idle-timeout-s: seconds that a connection may stay idle
FILES_EACH = 2  # file descriptors per client connection: its own, and one to a router
OTHER_FILES = 500  # file descriptors kept for listeners, health checks and HAProxy itself
BYTES_EACH = 64_000  # bytes of memory for one connection with TLS, without buffers for requests
MEMORY_SHARE = 1 / 8  # share of the machine's memory that connections may take
NEAR = 0.8  # above this share of the limit, each connection is closed after its response


def limited(config: str, *, limit: int, idle_s: float) -> str:
    """Return Serve's configuration with limits on client connections.

    Idle connections never take more than the share NEAR of the limit, so that connections are
    always left for running requests, health checks and refusals. The option `timeout client` limits
    how long a client may take for its TLS handshake, for the next part of its body, or for
    acknowledging the response. It is never shorter than DEFAULT_IDLE_S.

    Args:
        config: Serve's configuration of HAProxy.
        limit: Maximum number of client connections.
        idle_s: Seconds that a connection may stay idle after its first request.
    """
    near = int(limit * NEAR)
    close = f"    http-after-response set-header connection close if {{ fe_conn ge {near} }}\n"
    for pattern, replacement in (
        (r"^( +maxconn) .*", rf"\g<1> {limit}"),
        (r"^( +timeout http-keep-alive) .*", rf"\g<1> {int(idle_s * 1000)}ms"),
        (r"^( +timeout client) .*", rf"\g<1> {int(max(idle_s, DEFAULT_IDLE_S) * 1000)}ms"),
        (r"^(frontend http_frontend\n\s+bind .*\n)", rf"\g<1>{close}"),
    ):
        config = re.sub(pattern, replacement, config, flags=re.MULTILINE)
    return config


def max_connections() -> int:
    """Return how many connections this process's file descriptors and the memory allow."""
    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)
    by_memory = int(memory_bytes() * MEMORY_SHARE / BYTES_EACH)
    if files == resource.RLIM_INFINITY:
        return by_memory
    for_connections = max(files - OTHER_FILES, files // 2)  # at least half, if there are few
    return min(by_memory, for_connections // FILES_EACH)
