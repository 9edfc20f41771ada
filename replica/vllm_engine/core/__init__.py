"""vLLM's engine core: its scheduler, its events, and the calls from the replica's process."""
