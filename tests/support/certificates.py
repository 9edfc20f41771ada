"""Certificates for tests."""

from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from kvroute.wire.tls import WireTls

BOTH = (ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH)
DAY = timedelta(days=1)


class Authority:
    """A certificate authority that issues certificates to nodes."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self._folder, self._key = folder, ec.generate_private_key(ec.SECP256R1())
        builder = _builder(self._key.public_key(), age=DAY, rest=DAY, issuer=folder.name)
        constraints = x509.BasicConstraints(ca=True, path_length=None)
        root = builder.add_extension(constraints, critical=True).sign(self._key, hashes.SHA256())
        self.file = folder / "ca.pem"
        self.file.write_bytes(root.public_bytes(serialization.Encoding.PEM))

    def issue(
        self,
        name: str,
        *,
        age: timedelta = DAY,
        rest: timedelta = DAY,
        uses: tuple[x509.ObjectIdentifier, ...] = BOTH,
    ) -> WireTls:
        """Write a node's certificate and key. Return settings that use them.

        Args:
            name: the beginning of the files' names.
            age: for how long the certificate has been valid.
            rest: for how long it stays valid; negative: it has expired.
            uses: what it can be used for.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        builder = _builder(
            key.public_key(), age=age, rest=rest, issuer=self._folder.name, subject=name
        )
        builder = builder.add_extension(x509.ExtendedKeyUsage(uses), critical=False)
        files = self._folder / f"{name}.pem", self._folder / f"{name}-key.pem"
        _write(builder.sign(self._key, hashes.SHA256()), key, *files)
        return WireTls(True, str(files[0]), str(files[1]), str(self.file))


def certificate(folder: Path) -> tuple[Path, Path]:
    """Write a self-signed certificate for 127.0.0.1 and its key as PEM files; return the paths."""
    folder.mkdir(exist_ok=True)
    cert, key = folder / "cert.pem", folder / "key.pem"
    secret = ec.generate_private_key(ec.SECP256R1())
    address = x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))])
    builder = _builder(secret.public_key(), age=DAY, rest=DAY)
    signed = builder.add_extension(address, critical=False).sign(secret, hashes.SHA256())
    _write(signed, secret, cert, key)
    return cert, key


def _builder(
    key: ec.EllipticCurvePublicKey,
    *,
    age: timedelta,
    rest: timedelta,
    issuer: str = "kvroute's tests",
    subject: str = "",
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder(_name(issuer), _name(subject or issuer), key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - age)
        .not_valid_after(now + rest)
    )


def _name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _write(
    signed: x509.Certificate, secret: ec.EllipticCurvePrivateKey, cert: Path, key: Path
) -> None:
    cert.write_bytes(signed.public_bytes(serialization.Encoding.PEM))
    key.write_bytes(
        secret.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
