"""The sender of a request, identified by its API key."""

import hmac
import secrets
from dataclasses import dataclass
from hashlib import blake2b

from kvroute.contract.priority import Priority
from kvroute.keys.key_file import PREFIX, Key, KeyFile, hash_of
from kvroute.keys.limits import ANY, TenantLimits

# The entry that unknown ids are compared with: no secret has its hash.
NOBODY = Key("", "", (), bytes(16), secrets.token_bytes(32))


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a request."""

    tenant: str
    roles: frozenset[str]
    salt: str  # salt of all cached data of the tenant; replicas and Redis know it
    secret: str = ""  # salt of the tenant's stored responses; only routers know it
    priority: Priority = "default"  # the most urgent class that its requests can have

    def salted(self, own: str) -> str:
        """Return the salt of a request of this tenant with the `cache_salt` `own`.

        No salt belongs to two tenants.
        """
        return f"{self.salt}.{own}" if own else self.salt


def tenant_of(caller: Caller | None) -> str:
    """Return the caller's tenant; empty without API keys."""
    return "" if caller is None else caller.tenant


def salted(caller: Caller | None, own: str) -> str:
    """Return the salt of any request; `own` without API keys."""
    return own if caller is None else caller.salted(own)


def owner(caller: Caller | None, own: str) -> str:
    """Return the salt of the stored responses that a request can use."""
    return own if caller is None else f"{caller.secret}.{own}"


class Keyring:
    """All keys of a file."""

    def __init__(self, file: KeyFile) -> None:
        self._keys = {key.id: key for key in file.keys}
        tenants = {key.tenant for key in file.keys}
        salts = {tenant: _derived(tenant, file.secret, b"caches") for tenant in tenants}
        secrets = {tenant: _derived(tenant, file.secret, b"responses") for tenant in tenants}
        self._callers = {
            key.id: Caller(
                *(key.tenant, frozenset(key.roles), salts[key.tenant], secrets[key.tenant]),
                priority=key.priority,
            )
            for key in file.keys
        }
        limits = {tenant: file.tenants.get(tenant, file.tenants.get(ANY)) for tenant in tenants}
        self._limits = {tenant: limit for tenant, limit in limits.items() if limit is not None}

    def limits(self, tenant: str) -> TenantLimits | None:
        """Return the limits of a tenant with a key; None: it has no limits."""
        return self._limits.get(tenant)

    def caller(self, given: str) -> Caller | None:
        """Return the owner of an API key; None if the key is not valid.

        The check takes equally long for unknown ids and for wrong secrets.
        """
        prefix, _, rest = given.partition("-")
        id_, _, secret = rest.partition("-")
        key = self._keys.get(id_, NOBODY)
        is_right = hmac.compare_digest(hash_of(secret, key.salt), key.hash)
        return self._callers.get(id_) if is_right and prefix == PREFIX else None


def _derived(tenant: str, secret: bytes, purpose: bytes) -> str:
    return blake2b(tenant.encode(), key=secret, digest_size=16, person=purpose).hexdigest()
