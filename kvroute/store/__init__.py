"""Data in Redis, such as the index. Besides features, no other package knows Redis keys."""
