"""TLS contexts for both ends of a connection."""

import ssl
from hashlib import sha256
from pathlib import Path
from typing import Literal, NamedTuple

Role = Literal["server", "client"]

_PEM_END = "-----END CERTIFICATE-----"


class TlsEnd(NamedTuple):
    """The TLS context of one end of a connection, and its certificate's digest."""

    context: ssl.SSLContext
    digest: bytes  # SHA-256 of this end's certificate


def new_context(role: Role) -> ssl.SSLContext:
    """Return a context without certificates. It requires TLS 1.3 and a certificate of the peer."""
    is_server = role == "server"
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # The replica's secret, not a host name, says which replica a router talks to.
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    if is_server:
        context.num_tickets = 0  # no connection resumes an earlier session
    return context


def end_of_files(cert: str, key: str, ca: str, role: Role) -> TlsEnd:
    """Read the PEM files of a certificate with its chain, of its key, and of the authorities.

    Raises:
        OSError: a file cannot be read, or the key does not belong to the certificate.
        ValueError: the file of the certificate is no text in PEM format.
    """
    context = new_context(role)
    context.load_cert_chain(cert, key)
    context.load_verify_locations(ca)
    text = Path(cert).read_text()
    first = text[text.index("-----BEGIN CERTIFICATE") : text.index(_PEM_END) + len(_PEM_END)]
    return TlsEnd(context, sha256(ssl.PEM_cert_to_DER_cert(first)).digest())


def shake_hands(server: ssl.SSLContext, client: ssl.SSLContext) -> None:
    """Check two contexts by a handshake in memory. Raises ssl.SSLError if one refuses."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        client.wrap_bio(to_client, to_server, server_side=False),
        server.wrap_bio(to_server, to_client, server_side=True),
    ]
    while ends:
        for end in [*ends]:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
            ends.remove(end)
