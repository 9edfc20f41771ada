"""Metrics, traces and request logs of a router."""
