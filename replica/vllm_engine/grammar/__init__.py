"""Grammars from clients. A separate process validates them before the engine compiles them."""
