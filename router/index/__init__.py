"""What a router knows of the caches: which replicas hold a prompt's leading blocks."""
