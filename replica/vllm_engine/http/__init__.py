"""vLLM's HTTP application, which answers in the replica's process."""
