"""The router's ASGI middleware. Every request passes it before its route."""
