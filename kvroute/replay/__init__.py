"""Replays a trace on modelled replicas under any routing policy."""
