"""Requests, responses and errors in OpenAI's shapes."""
