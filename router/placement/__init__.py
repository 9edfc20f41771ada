"""How a router ranks the replicas for a prompt, and what follows from each placement."""
