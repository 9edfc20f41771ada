"""API keys: who may use, observe and manage a cluster."""
