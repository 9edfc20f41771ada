"""The TCP connection between a router and a replica, which carries requests and answers."""
