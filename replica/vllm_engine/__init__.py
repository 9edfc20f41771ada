"""vLLM as an engine: only modules in this package import vLLM."""
