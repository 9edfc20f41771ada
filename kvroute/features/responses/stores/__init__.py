"""Responses and conversations in Redis, which clients can read and continue."""
