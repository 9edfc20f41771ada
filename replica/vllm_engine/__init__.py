"""vLLM as an engine. Only modules in this package import vLLM."""
