"""What a router knows of the fleet, and the ranking that follows from it."""
