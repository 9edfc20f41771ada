"""API keys, which decide who may use, observe and manage a cluster, and the limits of tenants."""
