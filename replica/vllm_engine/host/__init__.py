"""The host tier of vLLM's KV cache: blocks that are copied to the machine's memory."""
