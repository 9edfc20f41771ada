"""Continues an answer of a stock server on another stock server."""
