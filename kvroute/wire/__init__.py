"""One connection between each router and each replica carries requests and answers."""
