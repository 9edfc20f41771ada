"""A router reports metrics, traces, request logs and audits."""
