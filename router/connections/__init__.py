"""A router's connections to the replicas, and how it notices that one is lost."""
