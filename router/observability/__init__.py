"""What a router reports: metrics, traces and request logs."""
