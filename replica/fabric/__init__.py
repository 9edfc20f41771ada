"""Moves blocks between the host memory of replicas, and to files. It knows no engine."""
