"""Ids of what a tenant owns, so that two tenants can use the same name."""

# Stands between a tenant's name and the name of what it owns; names from clients may not have it.
TENANT_SEPARATOR = "␟"


def own_id(tenant: str, name: str) -> str:
    """Return the id of what a tenant owns under a name."""
    return f"{tenant}{TENANT_SEPARATOR}{name}"
