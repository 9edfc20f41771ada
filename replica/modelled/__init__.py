"""The scheduler and the KV cache of a modelled engine, for the simulated engine and for replay."""
