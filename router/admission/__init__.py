"""Admission control: the limits of tenants, and the waits of requests."""
