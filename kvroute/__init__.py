"""kvroute: every request goes to the replica most likely to hold its prompt's KV cache."""
