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

VERSION = 1  # version of the file's format
PREFIX = "kvr"  # first part of every key
ID_BYTES = 6  # number of random bytes in a key's id, which is written in hex
SECRET_BYTES = 32  # number of random bytes in a key's secret
MAX_BYTES = 16 << 20  # maximum size of the file

# What a key allows. use: generate and embed. observe: read the live page, the metrics and the state
# of the cluster, all of which show every tenant's requests. manage: change what the cluster serves,
# run audits.
Role = Literal["use", "observe", "manage"]
ROLES: tuple[Role, ...] = get_args(Role)
TENANT = r"^[\w.@-]{1,64}\Z"  # pattern of a tenant's name

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
