"""What a router reports: metrics, traces, request logs and audits."""
