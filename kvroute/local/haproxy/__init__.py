"""HAProxy as Ray Serve starts it: its configuration, error pages and health check."""
