"""Who a request is from, by its API key."""

import hmac
import secrets
from dataclasses import dataclass
from hashlib import blake2b

from kvroute.contract.priority import Priority
from kvroute.keys.key_file import PREFIX, Key, KeyFile, hash_of
from kvroute.keys.limits import ANY, TenantLimits

NOBODY = Key("", "", (), bytes(16), secrets.token_bytes(32))  # its secret is unknown


@dataclass(frozen=True, slots=True)
class Caller:
    """Who has sent a request."""

    tenant: str
    roles: frozenset[str]
    salt: str  # of all that the tenant's requests leave in caches; replicas and Redis know it
    secret: str = ""  # of its stored responses; only routers know it
    priority: Priority = "default"  # the most urgent that its requests can have

    def salted(self, own: str) -> str:
        """The salt of a request with a `cache_salt` of its own, which parts the tenant's caches
        further. No two tenants have an equal one."""
        return f"{self.salt}.{own}" if own else self.salt


def tenant_of(caller: Caller | None) -> str:
    """Empty without keys."""
    return "" if caller is None else caller.tenant


def salted(caller: Caller | None, own: str) -> str:
    """The same for any request; without keys there is no caller."""
    return own if caller is None else caller.salted(own)


def owner(caller: Caller | None, own: str) -> str:
    """Whose stored responses a request finds: its tenant's, of its `cache_salt`."""
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
        self._limits = {tenant: found for tenant, found in limits.items() if found is not None}

    def limits(self, tenant: str) -> TenantLimits | None:
        """Those of a tenant with a key; None: it has no limits."""
        return self._limits.get(tenant)

    def caller(self, given: str) -> Caller | None:
        """Whose key it is; None if it is nobody's. It takes as long for unknown ids as for wrong
        secrets."""
        prefix, _, rest = given.partition("-")
        id_, _, secret = rest.partition("-")
        key = self._keys.get(id_, NOBODY)
        is_right = hmac.compare_digest(hash_of(secret, key.salt), key.hash)
        return self._callers.get(id_) if is_right and prefix == PREFIX else None


def _derived(tenant: str, secret: bytes, purpose: bytes) -> str:
    return blake2b(tenant.encode(), key=secret, digest_size=16, person=purpose).hexdigest()
