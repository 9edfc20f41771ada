"""The blocks of vLLM's KV cache: their fingerprints, their events and the order of eviction."""
