"""The router's state for the live page and the doctor: decisions, samples, the queue."""
