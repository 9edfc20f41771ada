"""The simulated engine: it has vLLM's block accounting and modelled time, but no model."""
