"""Prefixes with a name, or worth one."""
