"""The file of API keys, and whose key a text is. The file has a salted hash of each key's secret.

A key is `kvr-ID-SECRET`. ID selects the entry in the file. SECRET has 256 random bits, so a fast
hash is enough.
"""

import fcntl
import hmac
import os
import secrets
import stat
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from kvroute.contract.priority import Priority
from kvroute.contract.unreadable import DECODE_ERRORS
from kvroute.features.gate import TENANT, Caller, Role
from kvroute.features.keys.limits import ANY, NO_LIMITS, TenantLimits
from kvroute.machine.problem import StartError

VERSION = 1  # version of the file's format
PREFIX = "kvr"  # first part of every key
ID_BYTES = 6  # number of random bytes in a key's id, which is written in hex
SECRET_BYTES = 32  # number of random bytes in a key's secret
MAX_BYTES = 16 << 20  # maximum size of the file

Id = Annotated[str, Meta(pattern=rf"^[0-9a-f]{{{2 * ID_BYTES}}}$")]
Tenant = Annotated[str, Meta(pattern=TENANT)]
Limited = Annotated[str, Meta(pattern=rf"{TENANT}|^\*\Z")]  # a tenant, or limits.ANY


class KeyFileError(ValueError):
    """The key file cannot be read, used or written; the message says why."""


class Key(Struct, frozen=True):
    """The entry of one key in the file, without the key's secret."""

    id: Id
    tenant: Tenant
    roles: Annotated[tuple[Role, ...], Meta(min_length=1)]
    salt: Annotated[bytes, Meta(min_length=16, max_length=16)]
    hash: Annotated[bytes, Meta(min_length=32, max_length=32)]
    created: str = ""  # ISO date
    priority: Priority = "default"  # most urgent priority class of requests with this key


class KeyFile(Struct, frozen=True):
    """The content of the file."""

    # The tenants' salts, which separate their caches and responses, are derived from this secret.
    # If it changes, no request matches the tenants' earlier cached blocks.
    secret: Annotated[bytes, Meta(min_length=32, max_length=32)]
    keys: tuple[Key, ...] = ()
    version: int = VERSION
    tenants: dict[Limited, TenantLimits] = {}  # tenant, or limits.ANY -> its limits


# A key with an unknown id is checked against this entry, so that the check takes as long as for a
# known id. It always fails, because no secret has this random hash.
NOBODY = Key("", "", (), bytes(16), secrets.token_bytes(32))


def new_file() -> KeyFile:
    """Create an empty file with a random secret."""
    return KeyFile(secrets.token_bytes(32))


def new_key(
    tenant: str, roles: Sequence[Role], created: str, priority: Priority = "default"
) -> tuple[str, Key]:
    """Create a key. Return the text that the client sends, and the entry for the file.

    Raises:
        msgspec.ValidationError: the tenant or a role is invalid.
    """
    id_, secret = secrets.token_hex(ID_BYTES), secrets.token_urlsafe(SECRET_BYTES)
    salt = secrets.token_bytes(16)
    entry = Key(id_, tenant, tuple(roles), salt, hash_of(secret, salt), created, priority)
    msgspec.convert(msgspec.to_builtins(entry), Key)
    return f"{PREFIX}-{id_}-{secret}", entry


def hash_of(secret: str, salt: bytes) -> bytes:
    """Return the salted hash of a key's secret."""
    return blake2b(secret.encode(errors="replace"), digest_size=32, salt=salt).digest()


def read(path: Path) -> KeyFile:
    """Read the file. Raises KeyFileError."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise KeyFileError(f"{path} cannot be read: {error.strerror}") from None
    if len(data) > MAX_BYTES:
        raise KeyFileError(f"{path} is larger than {MAX_BYTES >> 20} MB; is it a file of API keys?")
    try:
        decoded = msgspec.json.decode(data, type=KeyFile)
    except DECODE_ERRORS as error:
        raise KeyFileError(f"{path} is not a file of API keys: {error}") from None
    if decoded.version != VERSION:
        raise KeyFileError(
            f"{path} has version {decoded.version}; this kvroute reads version {VERSION}"
        )
    if len({key.id for key in decoded.keys}) < len(decoded.keys):
        raise KeyFileError(f"{path} has two keys with the same id; remove one of them")
    return decoded


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Let no other `kvroute keys` command change the file in this context. Raises KeyFileError.

    The lock is on the folder, since `write` replaces the file.
    """
    try:
        folder = os.open(path.resolve().parent, os.O_RDONLY)
    except OSError as error:
        raise KeyFileError(f"the folder of {path} cannot be read: {error.strerror}") from None
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def write(path: Path, file: KeyFile) -> None:
    """Replace the file atomically. Raises KeyFileError.

    Only its owner can read a new file. An existing file keeps its owner and mode, so that routers
    can still read it.
    """
    data = msgspec.json.format(msgspec.json.encode(file), indent=1) + b"\n"
    path = path.resolve()  # replace the file, not a symbolic link to it
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # mode 0600
        try:
            with os.fdopen(handle, "wb") as written:
                if path.exists():
                    existing = path.stat()
                    os.fchown(handle, existing.st_uid, existing.st_gid)
                    os.fchmod(handle, stat.S_IMODE(existing.st_mode))
                written.write(data)
                written.flush()
                os.fsync(handle)
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise
    except OSError as error:
        raise KeyFileError(f"{path} cannot be written: {error.strerror}") from None


def check_keys(path: Path | None) -> None:
    """Check the file before a cluster is started with it. None: the cluster needs no keys.

    Raises:
        StartError: the file cannot be used, or has no key.
    """
    if path is None:
        return
    try:
        file = read(path)
    except KeyFileError as error:
        raise StartError(f"--api-keys: {error}; kvroute keys add makes one") from None
    if not file.keys:
        raise StartError(f"--api-keys: {path} has no key; add one with kvroute keys add")


class Keyring:
    """The keys and the limits in a key file."""

    def __init__(self, file: KeyFile) -> None:
        self._keys = {key.id: key for key in file.keys}
        otherwise = file.tenants.get(ANY, NO_LIMITS)
        self._limits = {key.tenant: file.tenants.get(key.tenant, otherwise) for key in file.keys}
        self._callers = {key.id: self._owner(key, file.secret) for key in file.keys}

    def limits(self, tenant: str) -> TenantLimits:
        """Return the limits of a tenant. One without a key has none."""
        return self._limits.get(tenant, NO_LIMITS)

    def tenant(self, name: str, priority: Priority) -> Caller | None:
        """Return a tenant as the sender of requests; None if it has no key with the role use."""
        callers = [caller for caller in self._callers.values() if caller.tenant == name]
        if not any("use" in caller.roles for caller in callers):
            return None
        return replace(callers[0], roles=frozenset({"use"}), priority=priority)

    def caller(self, api_key: str) -> Caller | None:
        """Return the owner of an API key; None if the key is not valid.

        The check takes the same time for an unknown id as for a wrong secret.
        """
        prefix, _, id_and_secret = api_key.partition("-")
        id_, _, secret = id_and_secret.partition("-")
        key = self._keys.get(id_, NOBODY)
        is_right = hmac.compare_digest(hash_of(secret, key.salt), key.hash)
        return self._callers.get(id_) if is_right and prefix == PREFIX else None

    def _owner(self, key: Key, secret: bytes) -> Caller:
        """Return the sender of requests with a key. `secret` is that of the key file."""
        limits = self._limits[key.tenant]
        return Caller(
            tenant=key.tenant,
            roles=frozenset(key.roles),
            salt=_derived(key.tenant, secret, b"caches"),
            secret=_derived(key.tenant, secret, b"responses"),
            priority=key.priority,
            limits=limits.by_name,
            adapters=limits.adapters,
        )


def _derived(tenant: str, secret: bytes, purpose: bytes) -> str:
    """Return a tenant's salt for one purpose; nobody without the secret can compute it."""
    return blake2b(tenant.encode(), key=secret, digest_size=16, person=purpose).hexdigest()
