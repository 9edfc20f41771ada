"""Batches: files of requests in OpenAI's format, answered in the order that caches like."""
