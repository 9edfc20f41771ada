"""Grammars of clients: validated in a process of their own, and compiled by the engine."""
