"""A replica: runs one engine and publishes which KV blocks it has cached."""
