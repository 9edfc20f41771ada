"""Rewrites what agents' clients send into messages that vLLM's application can read."""
