"""Batches: files of requests in OpenAI's format, sent in an order that gives many cache hits."""
