"""What the live page and the doctor show of a router: its last decisions, queue and seats."""
