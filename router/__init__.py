"""The router: an HTTP server that sends each request to the best replica."""
