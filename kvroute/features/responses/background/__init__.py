"""Responses that run in the background: they survive their client, routers and replicas."""
