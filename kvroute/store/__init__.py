"""All data in Redis, such as the index and named prefixes. No other package knows Redis keys."""
