"""Services for every process of a cluster: logs, traces, metrics, the built-in model."""
