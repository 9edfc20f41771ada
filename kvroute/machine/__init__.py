"""Finds out before a start what this machine lacks to run a cluster."""
