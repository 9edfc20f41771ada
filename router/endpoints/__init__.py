"""The router's HTTP routes, with one module for each kind of route."""
