"""The router's state for the live page and the doctor: its last decisions, queue and seats."""
