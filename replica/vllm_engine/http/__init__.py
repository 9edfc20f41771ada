"""vLLM's HTTP application, which runs in the replica's process."""
