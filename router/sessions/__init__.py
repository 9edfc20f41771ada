"""Conversations: their turns, changes in their history, and where prompts diverge."""
