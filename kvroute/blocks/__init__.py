"""Blocks of a KV cache: their fingerprints, the groups of layers that share them, and the tiers."""
