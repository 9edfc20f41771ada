"""The environment variables that Ray and Ray Serve read on every node, only at their start.

`python -m kvroute.settings.serve_environment` prints them for a shell. deploy/Dockerfile repeats
them, because an image's environment cannot be computed; a test keeps both equal.
"""

import shlex
import sys
from pathlib import Path


def serve_environment() -> dict[str, str]:
    return {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "token",  # whoever reaches Ray's ports must know it
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
        # Lines of Serve's logs that are buffered: more would delay warnings.
        "RAY_SERVE_REQUEST_PATH_LOG_BUFFER_SIZE": "1",
        "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": (
            "kvroute.router.middleware.serve_headers:middlewares"
        ),
        # When the routers change, a new HAProxy takes over. The old one may finish its streams for
        # this long, including those of other routers.
        "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": "3600",
        # For a router's idle connections from HAProxy, which uses them again: if one is closed just
        # then, a client gets no response. HAProxy's clients have --idle-timeout-s.
        "RAY_SERVE_HTTP_KEEP_ALIVE_TIMEOUT_S": "86400",
        # A HAProxy that was killed is replaced after three checks.
        "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "0.5",
        "RAY_SERVE_HAPROXY_BINARY_PATH": str(Path(sys.executable).with_name("kvroute-haproxy")),
    }


if __name__ == "__main__":
    for name, value in serve_environment().items():
        print(f"export {name}={shlex.quote(value)}")
