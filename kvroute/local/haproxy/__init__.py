"""Corrects the configuration, error pages and health check with which Ray Serve runs HAProxy."""
