"""Parsing and validation of requests, and responses and errors in the clients' formats."""
