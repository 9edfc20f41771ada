"""The router's view of the caches: which replicas hold the leading blocks of a prompt."""
