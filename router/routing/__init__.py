"""What a router knows about the fleet, and how it ranks the replicas for a prompt."""
