"""The environment variables that Ray and Ray Serve need on every node before they start.

`python -m kvroute.settings.serve_environment` prints them for a shell. deploy/Dockerfile has a copy
of them, because an image's environment cannot be computed. A test compares the copy.
"""

import shlex
import sys
from pathlib import Path


def serve_environment() -> dict[str, str]:
    """Return the variables and their values."""
    return {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "token",  # clients of Ray's ports must send Ray's token
        # Ray would end Serve's controller, all routers and all replicas as soon as the machine's
        # memory is nearly full, even if another program uses it. 0 switches that off.
        "RAY_memory_monitor_refresh_ms": "0",
        # When no memory is left, the kernel ends the largest process. Ray's default, 1000, would
        # let it end all processes that Ray has started before any other, however small they are.
        "RAY_worker_oom_score_adjustment": "0",
        # Ray's default, 15, would give routers and replicas a thirtieth of the CPU time that any
        # other busy program on the machine gets.
        "RAY_worker_niceness": "0",
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
        # Number of lines that Serve buffers before it writes them to its logs. A larger number
        # would delay warnings.
        "RAY_SERVE_REQUEST_PATH_LOG_BUFFER_SIZE": "1",
        # Middleware of Serve's HTTP servers; among others, it removes headers that control Serve.
        "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": (
            "kvroute.router.middleware.serve_headers:middlewares"
        ),
        # When the set of routers changes, a new HAProxy process takes over. The old process has
        # this many seconds to finish its streams, including the streams of other routers.
        "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": "3600",
        # Seconds until a router closes an idle connection from HAProxy. This time is long: if a
        # router closes a connection just when HAProxy reuses it, the client gets no response.
        # --idle-timeout-s is for the connections between clients and HAProxy.
        "RAY_SERVE_HTTP_KEEP_ALIVE_TIMEOUT_S": "86400",
        # Seconds between two health checks of HAProxy. Serve replaces it after three failed checks.
        "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "0.5",
        "RAY_SERVE_HAPROXY_BINARY_PATH": str(Path(sys.executable).with_name("kvroute-haproxy")),
    }


if __name__ == "__main__":
    for name, value in serve_environment().items():
        print(f"export {name}={shlex.quote(value)}")
