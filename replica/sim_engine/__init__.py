"""The simulated engine: vLLM's scheduling and block accounting, with modelled time and no model."""
