"""What a router knows of conversations: their turns, where they part, and whether they go on."""
