"""Placement: ranks the replicas for a prompt, and keeps account of the requests sent to them."""
