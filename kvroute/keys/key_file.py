"""The file of API keys. It has a salted hash of each key's secret, and no secret of a client.

A key is `kvr-ID-SECRET`. Its id finds its entry. The secret has 256 random bits, so a fast hash is
enough.
"""

import fcntl
import os
import secrets
import stat
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Annotated, Literal, get_args

import msgspec
from msgspec import Meta, Struct

from kvroute.contract.priority import Priority
from kvroute.contract.unreadable import DECODE_ERRORS
from kvroute.keys.limits import TenantLimits

VERSION = 1
PREFIX = "kvr"
ID_BYTES = 6  # of an id, as hex
SECRET_BYTES = 32
LARGEST = 16 << 20  # bytes of a file

# use: generate, and what belongs to it. observe: page, metrics, state of the cluster, with what all
# tenants do. manage: named prefixes, audits.
Role = Literal["use", "observe", "manage"]
ROLES: tuple[Role, ...] = get_args(Role)
TENANT = r"^[\w.@-]{1,64}\Z"

Id = Annotated[str, Meta(pattern=rf"^[0-9a-f]{{{2 * ID_BYTES}}}$")]
Tenant = Annotated[str, Meta(pattern=TENANT)]
Limited = Annotated[str, Meta(pattern=rf"{TENANT}|^\*\Z")]  # a tenant, or limits.ANY


class KeyFileError(ValueError):
    """The file cannot be used; the message says why."""


class Key(Struct, frozen=True):
    """An entry of the file."""

    id: Id
    tenant: Tenant
    roles: Annotated[tuple[Role, ...], Meta(min_length=1)]
    salt: Annotated[bytes, Meta(min_length=16, max_length=16)]
    hash: Annotated[bytes, Meta(min_length=32, max_length=32)]
    created: str = ""  # ISO date
    priority: Priority = "default"  # the most urgent that its requests can have


class KeyFile(Struct, frozen=True):
    """tenants' salts are derived from `secret`: another one empties all their caches. tenants: the
    limits of those that have some."""

    secret: Annotated[bytes, Meta(min_length=32, max_length=32)]
    keys: tuple[Key, ...] = ()
    version: int = VERSION
    tenants: dict[Limited, TenantLimits] = {}


def new_file() -> KeyFile:
    return KeyFile(secrets.token_bytes(32))


def new_key(
    tenant: str, roles: Sequence[Role], created: str, priority: Priority = "default"
) -> tuple[str, Key]:
    """A key as its client gets it, and its entry. msgspec.ValidationError for a tenant or a role
    that is none."""
    id_, secret = secrets.token_hex(ID_BYTES), secrets.token_urlsafe(SECRET_BYTES)
    salt = secrets.token_bytes(16)
    entry = Key(id_, tenant, tuple(roles), salt, hash_of(secret, salt), created, priority)
    msgspec.convert(msgspec.to_builtins(entry), Key)
    return f"{PREFIX}-{id_}-{secret}", entry


def hash_of(secret: str, salt: bytes) -> bytes:
    return blake2b(secret.encode(errors="replace"), digest_size=32, salt=salt).digest()


def read(path: Path) -> KeyFile:
    """Raises KeyFileError."""
    try:
        with path.open("rb") as file:
            data = file.read(LARGEST + 1)
    except OSError as error:
        raise KeyFileError(f"{path} cannot be read: {error.strerror}") from None
    if len(data) > LARGEST:
        raise KeyFileError(f"{path} is larger than {LARGEST >> 20} MB")
    try:
        found = msgspec.json.decode(data, type=KeyFile)
    except DECODE_ERRORS as error:
        raise KeyFileError(f"{path} is no file of keys: {error}") from None
    if found.version != VERSION:
        raise KeyFileError(f"{path} is of version {found.version}; this kvroute reads {VERSION}")
    if len({key.id for key in found.keys}) < len(found.keys):
        raise KeyFileError(f"{path} has a key twice")
    return found


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """No other `kvroute keys` changes it meanwhile. Raises KeyFileError."""
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
    """Replaces it at once. A new one can be read by its owner only; else owner and mode stay, so
    that routers can still read it. Raises KeyFileError."""
    data = msgspec.json.format(msgspec.json.encode(file), indent=1) + b"\n"
    path = path.resolve()  # not a link to it
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # mode 0600
        try:
            with os.fdopen(handle, "wb") as written:
                if path.exists():
                    before = path.stat()
                    os.fchown(handle, before.st_uid, before.st_gid)
                    os.fchmod(handle, stat.S_IMODE(before.st_mode))
                written.write(data)
                written.flush()
                os.fsync(handle)
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise
    except OSError as error:
        raise KeyFileError(f"{path} cannot be written: {error.strerror}") from None
