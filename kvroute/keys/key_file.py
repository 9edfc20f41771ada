"""The file of API keys. It has a salted hash of each key's secret, but not the secret itself.

A key is `kvr-ID-SECRET`. ID selects the entry in the file. SECRET has 256 random bits, so a fast
hash is enough.
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
ID_BYTES = 6  # random bytes of a key's id, which is written in hex
SECRET_BYTES = 32  # random bytes of a key's secret
LARGEST = 16 << 20  # most bytes of the file

# use: generating and embedding. observe: live page, metrics and state of the cluster, including the
# requests of all tenants. manage: named prefixes and audits.
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
    priority: Priority = "default"  # the most urgent class that the key's requests can have


class KeyFile(Struct, frozen=True):
    """The content of the file."""

    # Tenants' salts are derived from it: with another secret, nothing that they cached is found.
    secret: Annotated[bytes, Meta(min_length=32, max_length=32)]
    keys: tuple[Key, ...] = ()
    version: int = VERSION
    tenants: dict[Limited, TenantLimits] = {}  # limits by tenant, or by limits.ANY


def new_file() -> KeyFile:
    return KeyFile(secrets.token_bytes(32))


def new_key(
    tenant: str, roles: Sequence[Role], created: str, priority: Priority = "default"
) -> tuple[str, Key]:
    """Create a key; return it as its client gets it, and its entry.

    Raises:
        msgspec.ValidationError: the tenant or a role is invalid.
    """
    id_, secret = secrets.token_hex(ID_BYTES), secrets.token_urlsafe(SECRET_BYTES)
    salt = secrets.token_bytes(16)
    entry = Key(id_, tenant, tuple(roles), salt, hash_of(secret, salt), created, priority)
    msgspec.convert(msgspec.to_builtins(entry), Key)
    return f"{PREFIX}-{id_}-{secret}", entry


def hash_of(secret: str, salt: bytes) -> bytes:
    return blake2b(secret.encode(errors="replace"), digest_size=32, salt=salt).digest()


def read(path: Path) -> KeyFile:
    """Read the file. Raises KeyFileError."""
    try:
        with path.open("rb") as file:
            data = file.read(LARGEST + 1)
    except OSError as error:
        raise KeyFileError(f"{path} cannot be read: {error.strerror}") from None
    if len(data) > LARGEST:
        raise KeyFileError(f"{path} is larger than {LARGEST >> 20} MB")
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
    """Lock the file against other `kvroute keys` commands. Raises KeyFileError."""
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
