"""Grammars from clients: validated in a separate process, then compiled by the engine."""
