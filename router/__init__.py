"""The read path: a request in, the best replica out."""
