"""Conversations: their turns, changes in their history, and whether they will continue."""
