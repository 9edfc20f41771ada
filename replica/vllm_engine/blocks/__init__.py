"""The blocks of vLLM's cache: their fingerprints, their events and the order of eviction."""
