"""The engine: its scheduler, its events, and how this process reaches it."""
