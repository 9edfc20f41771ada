"""What is kept in Redis: the index, named prefixes, clusters. No other room knows a key."""
