"""Predicts prefill times, from an engine's speed and the prompts in its queue."""
