"""The processes of vLLM: how they start, where they run, and how their end is noticed."""
