"""A tier of vLLM's KV cache in host memory."""
