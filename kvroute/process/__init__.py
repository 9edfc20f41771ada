"""What every process of a cluster needs: logs, traces, metrics, Ray, the built-in model."""
