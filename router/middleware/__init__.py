"""The router's ASGI middleware, which every request passes before its route."""
