"""Certificates that processes make themselves.

A replica and its routers make certificates from the replica's secret: both derive the same
certificate authority from it, and each issues itself a certificate with a new key. These keys and
certificates are only in memory, and no process sends a key to another one.
"""

import hmac
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from hashlib import sha256

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from kvroute.wire.contexts import Role, TlsEnd, new_context

_AUTHORITY = b"kvroute certificate authority"
# Certificates that processes make are valid as long as the process runs, whatever its clock says.
_FROM, _UNTIL = datetime(2000, 1, 1, tzinfo=UTC), datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC)
_USES = {"server": ExtendedKeyUsageOID.SERVER_AUTH, "client": ExtendedKeyUsageOID.CLIENT_AUTH}


def made_end(secret: bytes, role: Role) -> TlsEnd:
    """Make a certificate that the other end accepts if it knows the same secret."""
    authority = Ed25519PrivateKey.from_private_bytes(hmac.digest(secret, _AUTHORITY, "sha256"))
    own = Ed25519PrivateKey.generate()
    uses = x509.ExtendedKeyUsage([_USES[role]])
    signed = _unsigned(role, own.public_key()).add_extension(uses, critical=True)
    certificate = signed.sign(authority, None)
    root = _unsigned("authority", authority.public_key())
    root = root.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    context = new_context(role)
    key = own.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    with _in_memory(certificate.public_bytes(Encoding.PEM) + key) as path:
        context.load_cert_chain(path)
    context.load_verify_locations(cadata=root.sign(authority, None).public_bytes(Encoding.DER))
    return TlsEnd(context, sha256(certificate.public_bytes(Encoding.DER)).digest())


def _unsigned(subject: str, key: Ed25519PublicKey) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(_name(subject))
        .issuer_name(_name("authority"))
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(_FROM)
        .not_valid_after(_UNTIL)
    )


def _name(subject: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"kvroute {subject}")])


@contextmanager
def _in_memory(data: bytes) -> Iterator[str]:
    """Yield a path that has the data, since Python reads keys from paths only."""
    with open(os.memfd_create("kvroute-wire"), "wb") as file:
        file.write(data)
        file.flush()
        yield f"/proc/self/fd/{file.fileno()}"
