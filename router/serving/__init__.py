"""Serves requests: the stages of a request, the parts of a model's router, and all models."""
