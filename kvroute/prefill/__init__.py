"""Prediction of prefill times: an engine's speed, and the prompts in its queue."""
