"""A router's connections to replicas and to other routers, and the detection of hung replicas."""
