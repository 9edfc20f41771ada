"""What an engine is, whichever runs."""
