"""Identifies the sender of a request by its API key."""

import hmac
import secrets
from dataclasses import dataclass, replace
from hashlib import blake2b

from kvroute.contract.priority import Priority
from kvroute.keys.key_file import PREFIX, Key, KeyFile, hash_of
from kvroute.keys.limits import ANY, TenantLimits

# A key with an unknown id is checked against this entry, so that the check takes as long as for a
# known id. It always fails, because no secret has this random hash.
NOBODY = Key("", "", (), bytes(16), secrets.token_bytes(32))


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a request: its tenant, and what its API key allows."""

    tenant: str
    roles: frozenset[str]
    salt: str  # cache salt of the tenant's prompts; replicas and Redis know this salt
    secret: str = ""  # salt of what the tenant stores in Redis; only routers know this salt
    priority: Priority = "default"  # most urgent priority class of its requests

    def salted(self, cache_salt: str) -> str:
        """Combine the tenant's salt with the `cache_salt` of a request, which may be empty.

        Two tenants never get the same result.
        """
        return f"{self.salt}.{cache_salt}" if cache_salt else self.salt


def tenant_of(caller: Caller | None) -> str:
    """Return the caller's tenant; empty if the cluster has no API keys."""
    return "" if caller is None else caller.tenant


def salted(caller: Caller | None, cache_salt: str) -> str:
    """Return the salt that separates the cached blocks of requests.

    Without API keys, this is the request's `cache_salt`.
    """
    return cache_salt if caller is None else caller.salted(cache_salt)


class Keyring:
    """The keys and the limits in a key file."""

    def __init__(self, file: KeyFile) -> None:
        self._keys = {key.id: key for key in file.keys}
        tenants = {key.tenant for key in file.keys}
        cache_salts = {tenant: _derived(tenant, file.secret, b"caches") for tenant in tenants}
        owner_salts = {tenant: _derived(tenant, file.secret, b"responses") for tenant in tenants}
        self._callers = {
            key.id: Caller(
                tenant=key.tenant,
                roles=frozenset(key.roles),
                salt=cache_salts[key.tenant],
                secret=owner_salts[key.tenant],
                priority=key.priority,
            )
            for key in file.keys
        }
        limits = {tenant: file.tenants.get(tenant, file.tenants.get(ANY)) for tenant in tenants}
        self._limits = {tenant: limit for tenant, limit in limits.items() if limit is not None}

    def limits(self, tenant: str) -> TenantLimits | None:
        """Return the limits of a tenant that has a key; None: no limits apply to it."""
        return self._limits.get(tenant)

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


def _derived(tenant: str, secret: bytes, purpose: bytes) -> str:
    """Return a tenant's salt for one purpose; nobody without the secret can compute it."""
    return blake2b(tenant.encode(), key=secret, digest_size=16, person=purpose).hexdigest()
