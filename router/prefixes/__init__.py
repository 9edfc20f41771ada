"""Named prefixes: prompt beginnings that clients declare, and that replicas keep warm."""
