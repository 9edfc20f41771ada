"""ASGI middleware of the routers: what happens to every request before its route."""
