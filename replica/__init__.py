"""The write path: one engine, and the publication of its KV cache."""
