"""The router's HTTP routes."""
