"""A router reports metrics, traces, request logs, the live page and audits."""
