"""Multipart forms: read part by part, so that no router holds a whole file in memory."""
