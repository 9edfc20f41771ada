"""Admission control: the limits of tenants, the seats of sessions, and the waits of requests."""
