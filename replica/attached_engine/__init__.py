"""An engine that forwards requests to a vLLM server that somebody else runs."""
