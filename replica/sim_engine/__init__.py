"""The simulated engine: it schedules requests and caches blocks as vLLM does, but runs no model."""
