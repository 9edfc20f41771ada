"""Which connections use TLS, with which certificates, and what its errors mean.

A replica decides whether its connections use TLS (--wire-tls), and its address says so to routers.
"""

import logging
import math
import os
import ssl
import time
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

from kvroute.wire.address import TlsMode
from kvroute.wire.contexts import Role, TlsEnd, end_of_files, shake_hands

log = logging.getLogger("kvroute.wire")

Ends = Callable[[], TlsEnd]  # returns what a server needs for its next connection

MAX_SECRETS = 256  # client contexts that a process keeps, one for each replica that it connects to
REPEAT_S = 60.0  # seconds after which a log repeats why connections are refused
MAX_REASONS = 32  # reasons whose time is remembered

# OpenSSL's X509_V_ERR codes. _OTHER_KEY: an authority with the same name has another key.
_OTHER_KEY, _NOT_YET_VALID, _EXPIRED, _WRONG_USE = 7, 9, 10, 26
_USE = "its extended key usage must have both serverAuth and clientAuth"
# OpenSSL's names of errors -> what has happened. {peer} is what is at the other end.
_REASONS = {
    "WRONG_VERSION_NUMBER": "the {peer} does not use TLS; run the same kvroute version, with the "
    "same --wire-tls, everywhere",
    "HTTP_REQUEST": "the {peer} does not use TLS, but sends HTTP; this port is for kvroute only",
    "UNSUPPORTED_PROTOCOL": "the {peer} does not offer TLS 1.3",
    "TLSV1_ALERT_PROTOCOL_VERSION": "the {peer} does not offer TLS 1.3",
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "the {peer} has sent no certificate; if it is a kvroute "
    "process, set its --wire-tls-cert, --wire-tls-key and --wire-tls-ca",
    "SSLV3_ALERT_CERTIFICATE_EXPIRED": "the {peer} refuses this process's certificate, which has "
    "expired; renew the files of --wire-tls-cert and --wire-tls-key",
    "TLSV1_ALERT_UNKNOWN_CA": "the {peer} refuses this process's certificate, which is not from an "
    "authority of its --wire-tls-ca; use certificates of the same authority on all nodes",
    "SSLV3_ALERT_BAD_CERTIFICATE": "the {peer} refuses this process's certificate; compare the "
    "clocks of both nodes, and look into the log of the {peer}",
    "SSLV3_ALERT_UNSUPPORTED_CERTIFICATE": "the {peer} refuses this process's certificate: " + _USE,
    "TLSV13_ALERT_CERTIFICATE_REQUIRED": "the {peer} requires a certificate; set --wire-tls-cert, "
    "--wire-tls-key and --wire-tls-ca",
}
NO_HANDSHAKE = (
    "the {peer} has made no TLS handshake; an older kvroute and a router without certificates "
    "wait like this: run the same version, with the same --wire-tls, everywhere"
)


class TlsError(OSError):
    """This process cannot use TLS. The message has the reason and the remedy."""


class WireTls(NamedTuple):
    """A process's settings for TLS. Paths are empty if there are no files."""

    is_on: bool = False  # whether the process's own servers require TLS
    cert: str = ""
    key: str = ""
    ca: str = ""

    @property
    def mode(self) -> TlsMode:
        """Return how the process's own servers encrypt."""
        if not self.is_on:
            return "off"
        return "files" if self.cert else "made"


OFF = WireTls()


def server_ends(tls: WireTls, secret: bytes) -> Ends | None:
    """Return the source of a server's certificate; None: it does not use TLS.

    Raises:
        TlsError: the files cannot be used.
    """
    match tls.mode:
        case "off":
            return None
        case "made":
            end = _made(secret, "server")
            return lambda: end
        case "files":
            check_files(tls)
            return _Files(tls, "server").end


def client_end(tls: WireTls, mode: TlsMode, secret: bytes) -> TlsEnd | None:
    """Return what a client needs to connect to a server; None: the server does not use TLS.

    Args:
        tls: the settings of this process.
        mode: how the server encrypts.
        secret: the server's secret.

    Raises:
        TlsError: this process cannot connect to such a server.
    """
    if mode == "off":
        return None
    if mode == "made":
        return _made_client(secret)
    if not tls.cert:
        raise TlsError(
            "the replica requires a certificate, and this process has none; set --wire-tls-cert, "
            "--wire-tls-key and --wire-tls-ca here, too"
        )
    return _client_files(tls).end()


def check_files(tls: WireTls) -> None:
    """Raise TlsError unless the files' certificate can be used at both ends of a connection."""
    server, client = (_read(tls, role) for role in ("server", "client"))
    try:
        shake_hands(server.context, client.context)
    except ssl.SSLError as error:
        why = explained(error, peer="certificate's owner")
        raise TlsError(f"{_named(tls)} cannot be used: {why}") from None


def explained(error: BaseException, *, peer: str) -> str:
    """Return what an error of TLS means, and what to do.

    Args:
        error: an error of a connection.
        peer: what is at the other end, such as "router".
    """
    if isinstance(error, ssl.SSLCertVerificationError):
        return _refused_certificate(error, peer)
    reason = error.reason or "" if isinstance(error, ssl.SSLError) else ""
    known = _REASONS.get(reason)
    return known.format(peer=peer) if known else str(error) or type(error).__name__


def _refused_certificate(error: ssl.SSLCertVerificationError, peer: str) -> str:
    if error.verify_code == _EXPIRED:
        return (
            f"the certificate of the {peer} has expired; renew the files of its --wire-tls-cert "
            "and --wire-tls-key"
        )
    if error.verify_code == _OTHER_KEY:
        return (
            f"the certificate of the {peer} is from an authority with another key; without "
            "--wire-tls-cert, the process at this address is not the expected one, and with it, "
            "all nodes need certificates of the same authority"
        )
    if error.verify_code == _NOT_YET_VALID:
        return f"the certificate of the {peer} is not valid yet; compare the clocks of both nodes"
    if error.verify_code == _WRONG_USE:
        return f"the certificate of the {peer} cannot be used: {_USE}"
    return (
        f"the certificate of the {peer} is not from the expected authority "
        f"({error.verify_message}); use certificates of one authority, which is in the file of "
        "--wire-tls-ca on all nodes"
    )


class Refusals:
    """Logs why a server refuses connections; a reason is repeated after REPEAT_S only."""

    def __init__(self) -> None:
        self._logged_s: dict[str, float] = {}  # reason -> time.monotonic of its last line

    def log(self, address: object, reason: str) -> None:
        """Log that a connection from this address was refused, unless it was just logged."""
        now_s = time.monotonic()
        if now_s - self._logged_s.get(reason, -math.inf) < REPEAT_S:
            return
        self._logged_s.pop(reason, None)
        self._logged_s[reason] = now_s
        if len(self._logged_s) > MAX_REASONS:
            del self._logged_s[next(iter(self._logged_s))]
        log.warning("refused a connection from %s: %s", address, reason)


class _Files:
    """The certificate files of one role, which are read again when they have changed."""

    def __init__(self, tls: WireTls, role: Role) -> None:
        self._tls, self._role = tls, role
        self._stamp: tuple[object, ...] = ()
        self._end: TlsEnd | None = None

    def end(self) -> TlsEnd:
        """Return the latest usable content of the files. Raises TlsError if there is none."""
        stamp = tuple(map(_stamp, self._tls[1:]))
        if self._end is not None and stamp == self._stamp:
            return self._end
        self._stamp = stamp
        try:
            self._end = _read(self._tls, self._role)
        except TlsError as error:
            if self._end is None:
                raise
            log.warning("the earlier certificate stays in use: %s", error)
        return self._end


_client_files = lru_cache(MAX_SECRETS)(lambda tls: _Files(tls, "client"))


@lru_cache(MAX_SECRETS)
def _made_client(secret: bytes) -> TlsEnd:
    return _made(secret, "client")


def _made(secret: bytes, role: Role) -> TlsEnd:
    from kvroute.wire.certificates import made_end  # takes long to import

    return made_end(secret, role)


def _read(tls: WireTls, role: Role) -> TlsEnd:
    try:
        return end_of_files(tls.cert, tls.key, tls.ca, role)
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        why = getattr(error, "strerror", None) or getattr(error, "reason", None) or error
        raise TlsError(
            f"{_named(tls)} cannot be used ({why}); expected the PEM files of a certificate with "
            "its chain, of its key, and of the authorities to trust"
        ) from None


def _named(tls: WireTls) -> str:
    return f"--wire-tls-cert {tls.cert}, --wire-tls-key {tls.key} and --wire-tls-ca {tls.ca}"


def _stamp(path: str) -> object:
    try:
        stat = os.stat(path)
    except OSError as error:
        return error.errno
    return stat.st_mtime_ns, stat.st_ino, stat.st_size
