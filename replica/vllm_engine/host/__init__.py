"""A tier of vLLM's cache in host memory."""
