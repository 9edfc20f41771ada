"""Speeds of modelled replicas: named profiles, and a fit to a running cluster."""
