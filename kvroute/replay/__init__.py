"""Replays a recorded trace on modelled replicas, to compare routing policies."""
