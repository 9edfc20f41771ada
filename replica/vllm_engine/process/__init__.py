"""The processes of vLLM: their start, their CPU cores, and the detection of a dead engine."""
