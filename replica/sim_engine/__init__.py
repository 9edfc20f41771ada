"""The simulated engine: no model, but vLLM's block accounting and modelled time."""
