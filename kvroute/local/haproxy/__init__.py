"""HAProxy: corrections of the configuration, error pages and health check that Serve gives it."""
