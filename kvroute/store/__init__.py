"""Data in Redis: the index, named prefixes, clusters. No other package uses Redis key names."""
