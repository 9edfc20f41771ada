"""Pulls between replicas: how fast the links are, which are in use, and which have failed."""
