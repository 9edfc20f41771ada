"""What any process of a cluster needs: logs, traces, metrics, the built-in model."""
