"""Requests to Ray Serve's controller: change the number of replicas, and empty a machine."""
